"""The gauges that a pod reads from the broker when Prometheus asks; every pod says the same of them.

However many ask, the broker is asked once a second. What it does not answer is not shown: an old number would look like
a new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TypeVar

from headrace.api.wire.ollama_models import serves
from headrace.broker import metrics
from headrace.broker.errors import BrokerDown
from headrace.broker.models import Model, service_levels
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings
from headrace.broker.snapshot import STATES

_Key = TypeVar("_Key")
_FRESH_S = 1.0
_PATIENCE_S = 2.0
"""A scrape that waits for long is one that has failed, and with it goes the word that the broker is away."""

_OF_THE_BROKER = (
    metrics.QUEUE_DEPTH,
    metrics.QUEUE_OLDEST,
    metrics.QUEUE_PROMPT_TOKENS,
    metrics.RUNNING_JOBS,
    metrics.REPLICAS,
    metrics.AUTOSCALER_DESIRED,
    metrics.AUTOSCALER_AGE,
)


class Gauges:
    """See the module."""

    def __init__(self, settings: Settings, broker: Broker) -> None:
        self._models: list[Model] = []
        self._broker = broker
        self._lock = asyncio.Lock()
        self._until = 0.0
        self._decided: dict[tuple[str, str], int] = {}
        self._starts: dict[str, int] = {}
        self.follow(settings)

    def follow(self, settings: Settings) -> None:
        """Show these models from now on, and nothing any more of those that are gone."""
        self.forget()
        self._models, self._until = list(settings.served()), 0.0
        for model in self._models:
            levels = service_levels(model)
            metrics.SLO_TARGET.labels(model.name, "ttft").set(levels.ttft_s)
            metrics.SLO_TARGET.labels(model.name, "tpot").set(levels.tpot_s)
            metrics.AUTOSCALER_ENABLED.labels(model.name).set(model.autoscaling is not None)

    async def refresh(self) -> None:
        """Bring them up to date; raises BrokerDown, and then there are none."""
        async with self._lock:
            if time.monotonic() < self._until:
                return
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    await self._read()
            except (BrokerDown, TimeoutError) as error:
                self.forget()
                raise BrokerDown(retry_after_s=1) from error
            self._until = time.monotonic() + _FRESH_S

    def forget(self) -> None:
        """The broker is away: nothing is known of what it has."""
        for gauge in _OF_THE_BROKER:
            gauge.clear()

    async def _read(self) -> None:
        for model in self._models:
            stats = await self._broker.stats(model.name)
            for band, count in stats.waiting.items():
                metrics.QUEUE_DEPTH.labels(model.name, band).set(count)
            metrics.QUEUE_OLDEST.labels(model.name).set(stats.oldest_ms / 1000)
            metrics.QUEUE_PROMPT_TOKENS.labels(model.name).set(stats.prompt_tokens)
            metrics.RUNNING_JOBS.labels(model.name).set(stats.running)
            metrics.REPLICA_STARTS.labels(model.name).inc(_grown(self._starts, model.name, stats.replica_starts))
            if model.autoscaling is not None:
                await self._read_autoscaler(model.name)
        replicas = await self._broker.listing("replicas")
        for model in self._models:
            self._count_replicas(model, replicas)

    @staticmethod
    def _count_replicas(model: Model, replicas: Mapping[str, Mapping[str, str]]) -> None:
        states = [about.get("state") for about in replicas.values() if serves(about, model.name)]
        for state in STATES:
            metrics.REPLICAS.labels(model.name, state).set(states.count(state))

    async def _read_autoscaler(self, model: str) -> None:
        if newest := await self._broker.decisions(model, 1):
            metrics.AUTOSCALER_DESIRED.labels(model).set(newest[0].target)
            metrics.AUTOSCALER_AGE.labels(model).set(max(0.0, time.time() - newest[0].at_ms / 1000))
        for word, times in (await self._broker.decided(model)).items():
            direction, _, reason = word.partition(":")
            grown = _grown(self._decided, (model, word), times)
            metrics.AUTOSCALER_DECISIONS.labels(model, direction, reason).inc(grown)


def _grown(known: dict[_Key, int], key: _Key, now: int) -> int:
    """How much a count in the broker has grown since it was last seen; one that has shrunk has begun anew."""
    before = known.get(key, 0)
    known[key] = now
    return now - before if now >= before else now
