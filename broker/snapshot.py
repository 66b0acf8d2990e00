"""The deployment now, in one value: what `/ops`, `headrace top` and `headrace status` show.

It is made of nothing but what the broker holds, so it is the same from any pod and any terminal, and needs no history:
replicas and pods publish their own last minutes (`figures.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct

from headrace.broker import figures, metrics, verdict
from headrace.broker.figures import Figures, Histogram, Published, published
from headrace.broker.messages import ScaleDecision
from headrace.broker.models import Model, service_levels
from headrace.broker.protocol import Broker, DeadLetter, ModelStats
from headrace.broker.settings import Settings
from headrace.broker.verdict import Verdict

MAX_DEAD = 20
MAX_DECISIONS = 10
STATES = ("starting", "ready", "draining")

_ATTAINMENT = 0.99
"""Of a model whose configuration says nothing."""


class Latency(Struct, frozen=True):
    """A distribution over the window, in ms, against its service level: `met` is the share within `slo_ms`."""

    count: int
    slo_ms: float
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    met: float | None = None


class ModelNow(Struct, frozen=True):
    """One model: its queue by band, its replicas by state, and how it has served over the window.

    `itl` are means of whole requests, as the metric is. `tokens_per_s` is what is being made now; `tokens` were made
    since the replicas that are present began.
    """

    name: str
    waiting: dict[str, int]
    oldest_s: float
    running: int
    slots: int
    states: dict[str, int]
    wanted: int
    attainment: float
    ttft: Latency
    itl: Latency
    tokens_per_s: float
    tokens: dict[str, int]
    is_autoscaled: bool
    decisions: list[ScaleDecision]
    problem: str = ""
    """Why it has no replica, if the cluster cannot place one."""


class ReplicaNow(Struct, frozen=True):
    """One replica, as it says itself; `progress` is what it is busy with while it starts.

    `batch` sequences are in its engine, whose KV cache is used to `kv_percent`; None where the engine does not say.
    """

    id: str
    model: str
    state: str
    slots: int
    running: int
    tokens_per_s: float
    progress: str
    host: str
    pid: int
    batch: int | None = None
    kv_percent: int | None = None
    node: str = ""
    """The cluster's name of the node that it lies on, if a cluster has placed it."""


class PodNow(Struct, frozen=True):
    """One pod; `requests` have ended there since it began."""

    id: str
    url: str
    host: str
    pid: int
    streams: int
    requests: int


class DeadNow(Struct, frozen=True):
    """A dead letter, without what was asked."""

    job: str
    model: str
    deaths: int
    died_ms: int
    died_of: str
    died_with: str


class Snapshot(Struct, frozen=True):
    """See the module. `total` counts since the processes that are present began, `recent` over `window_s`."""

    at_ms: int
    window_s: float
    verdict: Verdict
    memory_used: float
    models: list[ModelNow]
    replicas: list[ReplicaNow]
    pods: list[PodNow]
    dead: list[DeadNow]
    total: Figures
    recent: Figures


class Readings(Struct, frozen=True):
    """What a snapshot is made of, as the broker says it."""

    memory_used: float
    stats: Mapping[str, ModelStats]
    decisions: Mapping[str, Sequence[ScaleDecision]]
    replicas: Mapping[str, Mapping[str, str]]
    pods: Mapping[str, Mapping[str, str]]
    dead: Sequence[DeadLetter]


async def look(broker: Broker, settings: Settings) -> Snapshot:
    """Read everything and put it together; raises BrokerDown."""
    models = settings.models
    dead = [letter for shard in range(broker.shards) for letter in await broker.dead_letters(shard, MAX_DEAD)]
    readings = Readings(
        await broker.ping(),
        {model.name: await broker.stats(model.name) for model in models},
        {model.name: await broker.decisions(model.name, MAX_DECISIONS) for model in models if model.autoscaling},
        await broker.listing("replicas"),
        await broker.listing("pods"),
        sorted(dead, key=lambda letter: -letter.died_ms)[:MAX_DEAD],
    )
    return snapshot(settings, readings, round(time.time() * 1000))


def snapshot(settings: Settings, readings: Readings, at_ms: int) -> Snapshot:
    """The snapshot that these readings make."""
    said = {id: published(about) for id, about in (*readings.replicas.items(), *readings.pods.items())}
    kept = _once_a_process({**readings.replicas, **readings.pods}, said)
    seen = Snapshot(
        at_ms,
        figures.WINDOW_S,
        Verdict(),
        readings.memory_used,
        [_model(model, readings, said) for model in settings.models],
        [_replica(id, about, said[id]) for id, about in sorted(readings.replicas.items(), key=_by_model)],
        [_pod(id, about, said[id]) for id, about in readings.pods.items()],
        [_dead(letter) for letter in readings.dead],
        sum((each.total for each in kept), Figures()),
        sum((each.recent for each in kept), Figures()),
    )
    return verdict.judged(seen, settings)


def _once_a_process(present: Mapping[str, Mapping[str, str]], said: Mapping[str, Published]) -> list[Published]:
    """Metrics are a process's: where one process is several pods or replicas, they count once."""
    kept = {}
    for id, about in present.items():
        kept[about.get("host"), about.get("pid"), about.get("model"), "url" in about] = said[id]
    return list(kept.values())


def _model(model: Model, readings: Readings, said: Mapping[str, Published]) -> ModelNow:
    stats = readings.stats[model.name]
    own = {id: about for id, about in readings.replicas.items() if about.get("model") == model.name}
    counted = _once_a_process(own, said)
    recent = sum((each.recent for each in counted), Figures())
    chosen, levels = model.autoscaling, service_levels(model)
    decisions = list(readings.decisions.get(model.name, ()))
    states = [about.get("state", "") for about in own.values()]
    return ModelNow(
        model.name,
        stats.waiting,
        stats.oldest_ms / 1000,
        stats.running,
        sum(_number(about, "slots") for about in own.values() if about.get("state") == "ready"),
        {state: states.count(state) for state in STATES},
        (decisions[0].target if decisions else chosen.min_replicas) if chosen else model.replicas,
        chosen.attainment if chosen else _ATTAINMENT,
        _latency(recent.ttft, metrics.TIME_TO_FIRST_TOKEN, levels.ttft_s),
        _latency(recent.tpot, metrics.TIME_PER_OUTPUT_TOKEN, levels.tpot_s),
        round(sum(said[id].tokens_per_s for id in own), 1),
        sum((each.total for each in counted), Figures()).tokens,
        chosen is not None,
        decisions,
        stats.unplaced,
    )


def _latency(histogram: Histogram, metric: metrics.Metric, slo_s: float) -> Latency:
    uppers = figures.bounds(metric)
    p50, p95, p99 = (_ms(figures.quantile_s(histogram, uppers, share)) for share in (0.5, 0.95, 0.99))
    met = figures.share_within(histogram, uppers, slo_s)
    return Latency(histogram.count, 1000 * slo_s, p50, p95, p99, None if met is None else round(met, 4))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _by_model(row: tuple[str, Mapping[str, str]]) -> tuple[str, str]:
    return row[1].get("model", ""), row[0]


def _replica(id: str, about: Mapping[str, str], said: Published) -> ReplicaNow:
    return ReplicaNow(
        id,
        about.get("model", ""),
        about.get("state", ""),
        _number(about, "slots"),
        _number(about, "running"),
        said.tokens_per_s,
        about.get("progress", ""),
        about.get("host", ""),
        _number(about, "pid"),
        _number(about, "batch") if "batch" in about else None,
        _number(about, "kv_percent") if "kv_percent" in about else None,
        about.get("node", ""),
    )


def _pod(id: str, about: Mapping[str, str], said: Published) -> PodNow:
    requests = sum(said.total.requests.values())
    streams = _number(about, "streams")
    return PodNow(id, about.get("url", ""), about.get("host", ""), _number(about, "pid"), streams, requests)


def _dead(letter: DeadLetter) -> DeadNow:
    return DeadNow(letter.job.id, letter.view.model, letter.deaths, letter.died_ms, letter.died_of, letter.died_with)


def _number(about: Mapping[str, str], name: str) -> int:
    text = about.get(name, "")
    return int(text) if text.isdecimal() else 0
