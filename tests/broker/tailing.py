"""What the tests of the tail share: a log as its worker fills it, and a pod's tail on a broker that fails as told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from headrace.broker.protocol import Append, Broker, Hint
from headrace.broker.tail import Reader, Tail
from tests.broker.steps import STEP, admit, claim, exchange, settle
from tests.faults import FaultyBroker


@dataclass
class Source:
    """A job's log as its worker fills it; `pod` is told of every entry, unless it is to be kept from it."""

    broker: Broker
    job_id: str
    attempt: int = 1
    n: int = 0

    async def write(self, count: int = 1, *, is_told: bool = True) -> None:
        entries = [Append(self.job_id, f"{self.attempt}-{self.n + i + 1}", STEP) for i in range(count)]
        self.n += count
        for entry in entries:
            assert (await exchange(self.broker, appends=[entry])).appends == ["ok"]
        if is_told:
            await self.tell(*entries)

    async def tell(self, *entries: Append) -> None:
        await exchange(self.broker, [Hint("pod", [entry]) for entry in entries])

    def entry(self, n: int) -> Append:
        return Append(self.job_id, f"{self.attempt}-{n}", STEP)

    async def end(self) -> None:
        assert await settle(self.broker, self.job_id, self.attempt, f"{self.attempt}-{self.n}") == "ok"


@dataclass
class Tailing:
    """A pod's tail on a broker that fails as told."""

    broker: Broker
    faults: FaultyBroker
    tail: Tail

    async def source(self, *, grace_ms: int = -1) -> Source:
        """A running job that this pod has admitted."""
        job_id = await admit(self.broker, pod="pod", grace_ms=grace_ms)
        assert (await claim(self.broker)).job.id == job_id
        return Source(self.broker, job_id)


MakeTail = Callable[..., Awaitable[Tailing]]


async def take(reader: Reader, count: int, within_s: float = 5.0) -> list[str]:
    """The next `count` entries' positions."""
    ids: list[str] = []
    async with asyncio.timeout(within_s):
        while len(ids) < count:
            ids += [entry.id for entry in await reader.read()]
    return ids


def positions(first: int, last: int, attempt: int = 1) -> list[str]:
    return [f"{attempt}-{n}" for n in range(first, last + 1)]
