"""Any mix of admissions, claims, ends and cancels: both brokers agree, and what Redis counts is what waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, get_args

import pytest
import redis

from headrace.broker import keys, messages
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import QueueFull
from headrace.broker.messages import BANDS, Band, Ended, Entry, Usage
from headrace.broker.protocol import Admission, Broker, Settle, Share
from headrace.broker.settings import QueueSettings
from tests.broker.steps import exchange, state_of
from tests.broker.twins import Twins, both_brokers
from tests.support import an_admission

QUEUE = QueueSettings(max_waiting_jobs=12, max_waiting_tokens=600, lease_s=60.0)
SHARES = {"a": Share(), "b": Share(weight=3.0, max_waiting_tokens=250), "c": Share(weight=0.7, max_waiting_jobs=5)}


@pytest.fixture
async def brokers(redis_server: EmbeddedServer, redis_client: redis.Redis) -> AsyncIterator[list[Broker]]:
    async with both_brokers(redis_server.url, QUEUE) as both:
        yield both


class Workload(Twins):
    """Random steps; each is done to both brokers, whose answers must be the same."""

    def __init__(self, seed: int, brokers: list[Broker]) -> None:
        super().__init__(seed, brokers)
        self._admitted: list[str] = []
        self._running: dict[str, int] = {}
        self.outcomes: Counter[str] = Counter()

    async def step(self) -> None:
        steps = [self.admit, self.admit, self.admit, self.claim, self.settle, self.release, self.cancel]
        await self._random.choice(steps)()
        await self.both(_stats)

    async def admit(self) -> None:
        owner, band = self._random.choice("abc"), self._random.choice(get_args(Band))
        cost, tokens = self._random.randint(1, 999), self._random.randint(0, 99)
        queueing: dict[str, Any] = {"cost_tokens": cost, "prompt_tokens": tokens, "share": SHARES[owner]}
        admission = an_admission(owner=owner, band=band, **queueing)
        outcome = await self.both(lambda broker: _outcome(broker, admission))
        self.outcomes[outcome] += 1
        if outcome == "admitted":
            self._admitted.append(admission.job.id)

    async def claim(self) -> None:
        async def ids(broker: Broker) -> list[tuple[str, int]]:
            return [(claim.job.id, claim.attempt) for claim in await broker.claim(0, "r", "m", count)]

        count = self._random.randint(0, 3)
        self._running.update(await self.both(ids))

    async def settle(self) -> None:
        if self._running:
            job_id, attempt = self._running.popitem()
            end = Ended("done", None, Usage(self._random.randint(0, 99), self._random.randint(0, 999)))
            settle = Settle(job_id, attempt, f"{attempt}-0", messages.encode(Entry(9, [end])), "done")
            await self.both(lambda broker: exchange(broker, settles=[settle]))

    async def release(self) -> None:
        if self._running:
            job_id, attempt = self._running.popitem()
            await self.both(lambda broker: broker.release("r", job_id, attempt, f"{attempt}-0"))

    async def cancel(self) -> None:
        if self._admitted:
            job_id = self._random.choice(self._admitted)
            await self.both(lambda broker: broker.cancel(job_id, "test"))

    async def shed(self) -> int:
        """How many jobs made room for others: nothing else makes one fail here."""
        states = [await self.both(partial(state_of, job_id=job_id)) for job_id in self._admitted]
        return states.count("failed")


async def _stats(broker: Broker) -> tuple[dict[str, int], int, int]:
    stats = await broker.stats("m")
    return stats.waiting, stats.running, stats.prompt_tokens


async def _outcome(broker: Broker, admission: Admission) -> str:
    try:
        await broker.admit(admission)
    except QueueFull as error:
        return error.code
    return "admitted"


def counted(client: Any) -> dict[str, int]:
    return {name.decode(): int(count) for name, count in client.hgetall(keys.key("load", 0, "m")).items()}


def waiting(client: Any) -> dict[str, int]:
    """What the counters must say, from the queues and the jobs themselves."""
    counts: dict[str, int] = {}
    for band in BANDS:
        for member in client.zrange(keys.key("queue", 0, f"m:{band}"), 0, -1):
            job = client.hgetall(keys.key("job", 0, member.decode()[-32:]))
            for kind, much in (("jobs", 1), ("bytes", len(job[b"spec"])), ("tokens", int(job[b"tokens"]))):
                for field in (kind, f"{kind}:{job[b'owner'].decode()}"):
                    counts[field] = counts.get(field, 0) + much
    return counts


@pytest.mark.parametrize("seed", range(6))
async def test_counters_are_exact_and_both_brokers_agree(
    brokers: list[Broker], redis_client: redis.Redis, seed: int
) -> None:
    workload = Workload(seed, brokers)
    for _ in range(250):
        await workload.step()
        assert counted(redis_client) == waiting(redis_client)
    assert min(workload.outcomes[outcome] for outcome in ("admitted", "queue_full", "owner_queue_full")) > 0
    assert await workload.shed() > 0
    await workload.both(lambda broker: _drain(broker))
    assert redis_client.exists(keys.key("load", 0, "m")) == 0
    assert redis_client.keys(keys.key("fair", 0, "*")) == []


async def _drain(broker: Broker) -> list[str]:
    return [claim.job.id for claim in await broker.claim(0, "r", "m", 999)]
