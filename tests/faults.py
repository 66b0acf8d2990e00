"""A broker that fails as it is told, around a real one or the one in memory; what is not told to fail goes through."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from inspect import iscoroutinefunction
from typing import Any, Literal, NamedTuple, cast

from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Append, Broker, Exchange, Hint, Lane, Listener, Settle

Fault = Literal["none", "before", "after", "partial"]
"""Nothing; it fails before anything is done; all is done, but the answer is lost; half is done, the answer is lost."""


class Sent(NamedTuple):
    """One exchange, as the writer sent it."""

    hints: Sequence[Hint]
    appends: Sequence[Append]
    settles: Sequence[Settle]


class FaultyLane:
    """See `FaultyBroker`."""

    def __init__(self, lane: Lane, faults: FaultyBroker) -> None:
        self._lane = lane
        self._faults = faults

    async def exchange(self, hints: Sequence[Hint], appends: Sequence[Append], settles: Sequence[Settle]) -> Exchange:
        self._faults.sent.append(Sent(hints, appends, settles))
        await self._faults.gate.wait()
        fault = self._faults.next("exchange")
        if fault == "none":
            return await self._lane.exchange(hints, appends, settles)
        if fault == "after":
            await self._lane.exchange(hints, appends, settles)
        if fault == "partial":
            await self._lane.exchange(hints, appends[: (len(appends) + 1) // 2], [])
        raise BrokerDown(f"a fault of the test: {fault}")

    async def close(self) -> None:
        await self._lane.close()


class FaultyBroker:
    """`plan[verb]` holds what becomes of the next calls of a verb; `exchange` is that of every lane."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.plan: dict[str, deque[Fault]] = {}
        self.down: set[str] = set()
        """Verbs that fail before anything is done, for as long as they stand here."""
        self.broken: set[str] = set()
        """Verbs that fail as nobody expects."""
        self.calls: list[str] = []
        self.sent: list[Sent] = []
        self.gate = asyncio.Event()
        """Closed, it holds every exchange back."""
        self.gate.set()
        self.loses_hints = False
        self.held: dict[str, asyncio.Event] = {}
        """Verbs that are done, but whose answers come only when their event is set."""

    @property
    def broker(self) -> Broker:
        """This, as what it stands in for."""
        return cast(Broker, self)

    def fail(self, verb: str, *faults: Fault) -> None:
        self.plan.setdefault(verb, deque()).extend(faults)

    def next(self, verb: str) -> Fault:
        self.calls.append(verb)
        if verb in self.down:
            return "before"
        plan = self.plan.get(verb)
        return plan.popleft() if plan else "none"

    def lane(self, shard: int) -> Lane:
        return FaultyLane(self._broker.lane(shard), self)

    def listen_hints(self, pod: str, on_hint: Callable[[bytes], None], on_gap: Callable[[], None]) -> Listener:
        def hear(message: bytes) -> None:
            if not self.loses_hints:
                on_hint(message)

        return self._broker.listen_hints(pod, hear, on_gap)

    def __getattr__(self, verb: str) -> Any:
        real = getattr(self._broker, verb)
        if not iscoroutinefunction(real):
            return real

        async def call(*args: Any, **kwargs: Any) -> Any:
            fault = self.next(verb)
            if verb in self.broken:
                raise RuntimeError(f"a bug of the test in {verb}")
            answer = await real(*args, **kwargs) if fault in ("none", "after") else None
            if held := self.held.get(verb):
                await held.wait()
            if fault != "none":
                raise BrokerDown(f"a fault of the test: {fault} {verb}")
            return answer

        return call
