"""What has become of the models on the cluster: asked of Serve once a second, and said to the broker where it matters.

A model that no node has room for keeps its deployment, since a node may come; but nobody is let wait for it for longer
than `ray.placement_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from headrace.broker.errors import BrokerDown
from headrace.broker.models import Model
from headrace.broker.protocol import Broker
from headrace.cluster.deployment import Deployed, deployed

FAILED = "the replicas of this model fail to start"
"""What callers are told; what Ray says is for whoever runs it."""


class Watch:
    """`once` may be called from any loop; `ask` is what Serve is asked with, and blocks."""

    def __init__(
        self,
        broker: Broker,
        placement_s: float,
        ask: Callable[[Sequence[Model]], list[Deployed]] = deployed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._placement_s = placement_s
        self._ask = ask
        self._clock = clock
        self._since: dict[str, float] = {}
        self._noted: set[str] = set()

    async def once(self, models: Sequence[Model]) -> list[Deployed]:
        """How the models are; the broker knows of those that have no place."""
        found = [self._patiently(each) for each in await asyncio.to_thread(self._ask, models)]
        for each in found:
            [names] = [model.names for model in models if model.name == each.model]
            with contextlib.suppress(BrokerDown):  # it is said again in a second
                await self._note(each, names)
        return found

    def _patiently(self, found: Deployed) -> Deployed:
        """It may only be that nodes or places are on their way."""
        if found.state != "unplaced":
            self._since.pop(found.model, None)
            return found
        since = self._since.setdefault(found.model, self._clock())
        return found if self._clock() - since >= self._placement_s else replace(found, state="starting")

    async def _note(self, found: Deployed, names: Sequence[str]) -> None:
        why = {"unplaced": found.message, "failed": FAILED}.get(found.state, "")
        if why or found.model in self._noted:
            for name in names:
                await self._broker.note_unplaced(name, why)
        self._noted = self._noted | {found.model} if why else self._noted - {found.model}
