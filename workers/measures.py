"""What a replica tells Prometheus of its engine and of the tokens it makes: once a second, never for a token."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.broker import metrics
from headrace.broker.models import Model
from headrace.workers.engines.protocol import Engine, Figures
from headrace.workers.run import JobRun


class Measures:
    """Of one replica. `take` is called as often as the replica says that it is there."""

    def __init__(self, model: Model, engine: Engine) -> None:
        self._name = model.name
        self._engine = engine
        self._seen = Figures(0)
        metrics.ENGINE_SLOTS.labels(model.name).set(model.slots)
        _begin(model.name)

    def take(self, runs: Iterable[JobRun]) -> dict[str, str | int]:
        """Bring the metrics up to date, and return what the registry is told of it."""
        held = 0
        for run in runs:
            run.count_tokens()
            held += run.held_tokens
        now, name = self._engine.figures(), self._name
        metrics.ENGINE_RUNNING.labels(name).set(now.running)
        metrics.ENGINE_STEPS.labels(name).inc(max(0, now.steps - self._seen.steps))
        metrics.ENGINE_STEP_SECONDS.labels(name).inc(max(0.0, now.step_s - self._seen.step_s))
        self._seen = now
        about: dict[str, str | int] = {"batch": now.running}
        kv_used = min(1.0, held / now.kv_room) if now.kv_used is None and now.kv_room else now.kv_used
        if kv_used is not None:
            metrics.ENGINE_KV_USED.labels(name).set(kv_used)
            about["kv_percent"] = round(100 * kv_used)
        return about


def _begin(model: str) -> None:
    """A counter that begins at 0 loses nothing: the first value that Prometheus sees of one says nothing of growth."""
    for slo in ("ttft", "tpot"):
        for outcome in ("met", "missed"):
            metrics.SLO_REQUESTS.labels(model, slo, outcome)
    for kind in ("prompt", "cached", "completion"):
        metrics.TOKENS.labels(model, kind)
    metrics.UNREAD_TOKENS.labels(model)
