"""The configuration: one YAML file, typed, read once at the edge and passed whole.

Unknown fields are errors. Every scalar can be overridden by `HEADRACE_<SECTION>__<FIELD>` (`HEADRACE_API__PORT=9000`),
the value read as YAML. `HEADRACE_PORT` and `HEADRACE_DATA` are short for `api.port` and `data_dir`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml
from msgspec import Struct

from headrace.broker import api_keys
from headrace.broker.api_keys import KeySettings as KeySettings
from headrace.broker.errors import ConfigError
from headrace.broker.model_checks import check_model, check_names
from headrace.broker.models import Model, served

DEFAULT_FILE = "headrace.yaml"

_ALONE = ("data_dir", "log_level", "log_format")
"""Values that stand in no section."""
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
    tls_ca_file: str | None = None
    """PEM file of who may vouch for a `rediss://` server; null is who the system trusts. Its name is checked always."""
    tls_cert_file: str | None = None
    """PEM files by which the server knows us, if it asks."""
    tls_key_file: str | None = None
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
    header_timeout_s: float = 30.0
    """A request's headers must be whole so long after their first byte, and a connection must ask something."""
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
    insecure: bool = False
    """Let anybody in who reaches this pod, as long as there are no keys; else only callers of this machine."""
    resumes_per_minute: int = 3000
    """How often an owner's streams may be resumed on one pod; where there are no keys there is no bound."""
    open_metrics: bool = False
    """Answer `/metrics` without a key that has the scope `metrics`."""
    hosts: list[str] = []
    """By which names, beside `localhost` and addresses in numbers, a pod without keys may be called; a page whose name
    was made to point at this machine would else speak for whoever reads it."""


class WorkerSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """A replica's loop."""

    tick_s: float = 0.1
    pace_s: float = 0.004
    """Steps are written to the log in batches that follow each other no faster than this; one that is alone is not held
    back."""
    drain_s: float = 30.0
    """How long a replica that was told to stop goes on with its running jobs before it hands them back."""
    step_timeout_s: float = 120.0
    """An engine that makes no step for this long, prefill included, is not healthy."""
    metrics_port: int | None = 0
    """Where a replica serves /metrics, on `api.host`: this port or, where it is taken, one of the 31 after it; 0 is any
    free one, null nowhere. Pods tell Prometheus which (`/metrics/targets`)."""


class RaySettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Where `headrace serve` places replicas."""

    address: str | None = None
    """A running Ray cluster, as `host:port` or `auto`; null: a Ray of this machine, started and ended with `serve`."""
    placement_s: float = 30.0
    """A model that no node has room for is waited for so long, then its requests are refused with the reason. Where
    nodes are started on demand it is as long as that takes."""


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


class TracingSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, sent to a collector; see docs/tracing-and-logs.md."""

    endpoint: str | None = None
    """OTLP over HTTP, `http://collector:4318`; null: no tracing."""
    sample_ratio: float = 1.0
    """The share of those requests that bring no `traceparent`."""
    follow_clients: bool = True
    """A request that brings a `traceparent` belongs to that trace, and is sampled as it says. False: none is read."""
    export_s: float = 5.0


class GenerationLogSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Prompts and answers in files, for debugging; see docs/tracing-and-logs.md."""

    folder: str | None = None
    """Each replica writes files of its own there; null: nothing is written."""
    max_bytes: int = 100_000_000
    """A file that is larger is put away, and another begun."""
    files: int = 4
    """How many a replica keeps besides the one it writes."""
    redact: str | None = None
    """`package.module:function`, which takes each text and returns what may be written."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything, as read from `headrace.yaml`."""

    models: list[Model]
    redis: RedisSettings = RedisSettings()
    queue: QueueSettings = QueueSettings()
    api: ApiSettings = ApiSettings()
    worker: WorkerSettings = WorkerSettings()
    autoscaler: AutoscalerSettings = AutoscalerSettings()
    tracing: TracingSettings = TracingSettings()
    generation_log: GenerationLogSettings = GenerationLogSettings()
    ray: RaySettings = RaySettings()
    keys: list[KeySettings] = []
    data_dir: str = ".headrace"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"

    def served(self) -> Iterator[Model]:
        """What requests may name: each model, and its adapters as models of their own."""
        return served(self.models)

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
    file = find(path)
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


def find(path: str | Path | None) -> Path:
    """The file that `load` reads for this path."""
    if path is not None:
        return Path(path)
    here = Path(DEFAULT_FILE)
    return here if here.exists() else Path(__file__).with_name(DEFAULT_FILE)


def _override(raw: dict[str, Any], env: Mapping[str, str]) -> None:
    short = {"HEADRACE_PORT": "HEADRACE_API__PORT", "HEADRACE_DATA": "HEADRACE_DATA_DIR"}
    sections = {name for name, kind in Settings.__annotations__.items() if kind.endswith("Settings")}
    for name, text in env.items():
        path = short.get(name, name).removeprefix("HEADRACE_").lower().split("__")
        if not name.startswith("HEADRACE_") or (len(path) == 1 and path[0] not in _ALONE):
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


def _check(file: Path, settings: Settings) -> None:
    def refuse(path: str, value: object, why: str) -> None:
        raise ConfigError(f"{file}: {path}: {value!r} {why}")

    if not settings.models:
        refuse("models", [], "must name at least one model")
    check_names(settings.models, refuse)
    for index, model in enumerate(settings.models):
        check_model(f"models[{index}]", model, refuse)
    if not 1 <= settings.redis.shards <= 65536:
        refuse("redis.shards", settings.redis.shards, "must be 1 to 65536")
    if not 0 < settings.api.port < 65536:
        refuse("api.port", settings.api.port, "must be a port number")
    for origin in settings.api.origins:
        if origin not in ("*", "null") and _ORIGIN.fullmatch(origin) is None:
            refuse("api.origins", origin, "must be like https://example.org, without a path, or *")
    if not 0.1 <= settings.autoscaler.period_s <= settings.autoscaler.stale_s:
        refuse("autoscaler.period_s", settings.autoscaler.period_s, "must be 0.1 to `stale_s`")
    if settings.tracing.endpoint is not None and not settings.tracing.endpoint.startswith(("http://", "https://")):
        refuse("tracing.endpoint", settings.tracing.endpoint, "must be an http or https URL")
    if not 0 <= settings.tracing.sample_ratio <= 1:
        refuse("tracing.sample_ratio", settings.tracing.sample_ratio, "must be 0 to 1")
    for section in ("redis", "queue", "api", "worker", "autoscaler", "ray", "tracing", "generation_log"):
        values = getattr(settings, section)
        for field in values.__struct_fields__:
            value = getattr(values, field)
            if value is not None and field.endswith(("_s", "_ms", "_bytes", "_jobs", "_tokens")) and value < 0:
                refuse(f"{section}.{field}", value, "must not be negative")
    if settings.api.resumes_per_minute < 1:
        refuse("api.resumes_per_minute", settings.api.resumes_per_minute, "must be 1 or more")
    if not 0 <= settings.queue.batch_share <= 1:
        refuse("queue.batch_share", settings.queue.batch_share, "must be 0 to 1")
    for index, key in enumerate(settings.keys):
        api_keys.check(f"keys[{index}]", key, refuse)
