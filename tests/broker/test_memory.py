"""The broker in memory runs on the clock that it is given."""

from __future__ import annotations

import pytest

from headrace.broker.errors import QueueFull
from headrace.broker.memory import MemoryBroker
from headrace.broker.settings import QueueSettings
from tests.broker.steps import admit, append, claim, finish, last_id, reap, serve, state_of, tick
from tests.support import an_admission

QUEUE = QueueSettings(lease_s=5.0, reader_lease_s=10.0, queue_timeout_s=300.0, max_run_s=3600.0, log_ttl_s=600.0)


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_ms = 1_700_000_000_000

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, seconds: float) -> None:
        self.now_ms += round(seconds * 1000)


async def test_a_lease_ends_at_its_time_and_not_before() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    await admit(broker)
    await claim(broker)
    clock.advance(4.999)
    assert (await reap(broker)).leases == 0
    clock.advance(0.001)
    assert (await reap(broker)).leases == 1


async def test_a_tick_renews_an_overdue_lease_that_is_still_there() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    await admit(broker)
    await claim(broker)
    clock.advance(60)
    await tick(broker, renew=True)
    assert (await reap(broker)).leases == 0


async def test_a_job_waits_for_its_timeout_and_not_longer() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    await admit(broker)
    clock.advance(299.999)
    assert (await reap(broker)).timeouts == 0
    clock.advance(0.001)
    assert (await reap(broker)).timeouts == 1


async def test_a_job_is_forgotten_after_the_longest_life_it_may_have() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    job_id = await admit(broker)
    await claim(broker)
    clock.advance(4499.999)
    assert await state_of(broker, job_id) == "running"
    clock.advance(0.001)
    assert await state_of(broker, job_id) == "unknown"
    assert await append(broker, job_id, "1-1") == "gone"


async def test_an_ended_log_is_kept_for_its_time_from_the_end() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    job_id = await finish(broker)
    clock.advance(599.999)
    assert await last_id(broker, job_id) == "1-1"
    assert await broker.watch("p", [job_id]) == [True]
    clock.advance(599.999)
    assert await last_id(broker, job_id) == "1-1"
    clock.advance(0.001)
    assert await last_id(broker, job_id) is None


async def test_the_drain_rate_is_of_the_last_half_minute_and_forgotten_after_five() -> None:
    clock = Clock()
    broker = MemoryBroker(QueueSettings(max_waiting_jobs=40), clock=clock)
    await serve(broker)

    async def retry_after_s() -> int | None:
        await serve(broker)
        with pytest.raises(QueueFull) as caught:
            await broker.admit(an_admission())
        return caught.value.retry_after_s

    for _ in range(30):
        await admit(broker)
        await claim(broker)
    for _ in range(40):
        await admit(broker)
    assert await retry_after_s() == 4
    clock.advance(30)
    assert await retry_after_s() == 11
    clock.advance(269.999)
    assert await retry_after_s() == 60
    clock.advance(0.001)
    assert await retry_after_s() == 5


async def test_entries_carry_the_time_since_the_job_was_enqueued() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    await serve(broker)
    await admit(broker)
    clock.advance(1.5)
    assert (await claim(broker)).waited_ms == 1500


async def test_what_is_left_of_a_forgotten_job_is_there_for_ten_seconds() -> None:
    clock = Clock()
    broker = MemoryBroker(QUEUE, clock=clock)
    await serve(broker)
    for is_ended in (True, False):
        job_id = await finish(broker) if is_ended else await admit(broker)
        await broker.forget(job_id)
        clock.advance(9.999)
        await serve(broker)
        assert await last_id(broker, job_id) is not None
        clock.advance(0.001)
        assert await last_id(broker, job_id) is None
        await serve(broker)
