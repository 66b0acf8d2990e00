"""The log's reader: whatever becomes of hints and connections, each reader gets every entry once and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from headrace.broker.errors import BrokerDown, JobNotFound, LogGap, LogLost
from headrace.broker.protocol import Append, Broker, Hint
from headrace.broker.tail import START, Reader, Tail
from tests.broker.steps import (
    STEP,
    MakeBroker,
    admit,
    append,
    claim,
    end_of,
    exchange,
    lose_log,
    reap,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.faults import Fault, FaultyBroker
from tests.support import eventually


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
    ids: list[str] = field(default_factory=list)

    async def source(self, *, grace_ms: int = -1) -> Source:
        """A running job that this pod has admitted."""
        job_id = await admit(self.broker, pod="pod", grace_ms=grace_ms)
        assert (await claim(self.broker)).job.id == job_id
        return Source(self.broker, job_id)


MakeTail = Callable[..., Awaitable[Tailing]]


@pytest.fixture
async def make_tail(make_broker: MakeBroker) -> AsyncIterator[MakeTail]:
    """A tail that has heard that its subscription stands."""
    tails: list[Tail] = []

    async def make(lease_s: float = 10.0) -> Tailing:
        faults = FaultyBroker(broker := await make_broker(reader_lease_s=lease_s))
        tail = Tail(faults.broker, "pod", lease_s)
        await tail.start()
        tails.append(tail)
        probe = await admit(broker)
        # the first connection calls for a look into every log, so it is over when a silent reader is behind
        reader = tail.open(probe, "0-1")
        await eventually(lambda: reader.is_behind)
        tail.close_reader(reader, None)
        await eventually(lambda: "unwatch" in faults.calls)
        await claim(broker)
        await settle(broker, probe, 1, "1-0")
        faults.calls.clear()
        return Tailing(broker, faults, tail)

    yield make
    for tail in tails:
        await tail.close()


@pytest.fixture
async def tailing(make_tail: MakeTail) -> Tailing:
    return await make_tail()


async def take(reader: Reader, count: int, within_s: float = 5.0) -> list[str]:
    """The next `count` entries' positions."""
    ids: list[str] = []
    async with asyncio.timeout(within_s):
        while len(ids) < count:
            ids += [entry.id for entry in await reader.read()]
    return ids


def positions(first: int, last: int, attempt: int = 1) -> list[str]:
    return [f"{attempt}-{n}" for n in range(first, last + 1)]


# -- following --------------------------------------------------------------------------------------------------------


async def test_a_reader_gets_what_it_is_told_of(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(3)
    await source.end()
    assert await take(reader, 4) == positions(1, 4)
    assert "read" not in tailing.faults.calls


async def test_a_reader_from_the_start_gets_the_first_entry_too(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, START)
    await source.write(2)
    assert await take(reader, 4) == ["0-1", *positions(0, 2)]


async def test_a_reader_that_comes_late_gets_all_and_then_what_is_new(tailing: Tailing) -> None:
    source = await tailing.source()
    await source.write(600, is_told=False)
    reader = await tailing.tail.attach(source.job_id)
    assert await take(reader, 602) == ["0-1", *positions(0, 600)]
    await source.write(2)
    await source.end()
    assert await take(reader, 3) == positions(601, 603)


async def test_a_reader_of_an_ended_log_gets_all(tailing: Tailing) -> None:
    source = await tailing.source()
    await source.write(2, is_told=False)
    await source.end()
    assert await take(await tailing.tail.attach(source.job_id), 5) == ["0-1", *positions(0, 3)]


async def test_a_reader_follows_the_next_attempt(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(2)
    await tailing.broker.release("r", source.job_id, 1, "1-2")
    await claim(tailing.broker, "r2")
    await Source(tailing.broker, source.job_id, attempt=2).write(1)
    assert await take(reader, 4) == ["1-1", "1-2", "2-0", "2-1"]


async def test_there_is_no_reader_of_an_unknown_job(tailing: Tailing) -> None:
    with pytest.raises(JobNotFound):
        await tailing.tail.attach(unknown_id())
    assert tailing.tail.readers == 0


async def test_poke_answers_with_nothing_and_loses_nothing(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    reader.poke()
    assert await reader.read() == []
    await source.write(1)
    assert await take(reader, 1) == ["1-1"]


async def test_what_is_here_is_read_before_an_error(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(2)
    await eventually(lambda: reader.position == "1-2")
    reader.fail(LogLost())
    assert await take(reader, 2) == positions(1, 2)
    with pytest.raises(LogLost):
        await reader.read()


# -- hints that are lost, doubled, early or many ----------------------------------------------------------------------


async def test_a_lost_hint_costs_little_more_than_a_second(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(1)
    assert await take(reader, 1) == ["1-1"]
    await source.write(3, is_told=False)
    assert await take(reader, 3, within_s=2.0) == positions(2, 4)


async def test_a_lost_end_is_found(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(1)
    tailing.faults.loses_hints = True
    await source.end()
    assert await take(reader, 2, within_s=2.0) == positions(1, 2)


async def test_hints_that_come_twice_or_in_disorder_change_nothing(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(6, is_told=False)
    await source.tell(*(source.entry(n) for n in (1, 1, 3, 2, 1, 5, 4, 3, 6, 6)))
    assert await take(reader, 6) == positions(1, 6)
    await source.write(1)
    assert await take(reader, 1) == ["1-7"]


async def test_a_hint_for_one_that_reads_the_log_just_now_is_not_lost(tailing: Tailing) -> None:
    source = await tailing.source()
    held = tailing.faults.held["read"] = asyncio.Event()
    reader = tailing.tail.open(source.job_id, START)
    taking = asyncio.create_task(take(reader, 5, within_s=0.7))
    await eventually(lambda: "read" in tailing.faults.calls)
    await source.write(3, is_told=False)
    await source.tell(source.entry(3), source.entry(2))  # its page was read before, and has neither
    await eventually(lambda: not reader.is_silent)
    held.set()
    assert await taking == ["0-1", *positions(0, 3)]


async def test_a_hint_of_what_the_log_has_lost_is_not_looked_for_without_end(tailing: Tailing) -> None:
    source = await tailing.source()
    held = tailing.faults.held["read"] = asyncio.Event()
    reader = tailing.tail.open(source.job_id, START)
    taking = asyncio.create_task(take(reader, 3))
    await eventually(lambda: "read" in tailing.faults.calls)
    await source.tell(source.entry(7))
    await eventually(lambda: not reader.is_silent)
    held.set()
    await eventually(lambda: reader.position == "1-0" and not reader.is_behind)
    await source.write(1)
    assert await taking == ["0-1", *positions(0, 1)]
    assert tailing.faults.calls.count("read") < 5


async def test_of_two_readers_of_a_job_the_one_behind_is_asked_for(tailing: Tailing) -> None:
    """One found the entries in the log by itself; a lost hint must not leave the other where it is."""
    source = await tailing.source()
    ahead: list[Reader] = []
    behind = tailing.tail.open(source.job_id, "1-0")
    await source.write(2, is_told=False)
    for _ in range(8):  # whatever the order in which they are looked at
        ahead.append(tailing.tail.open(source.job_id, START))
        await take(ahead[-1], 4)
    assert await take(behind, 2, within_s=2.0) == positions(1, 2)


async def test_a_slow_reader_keeps_little_and_gets_all(tailing: Tailing) -> None:
    source = await tailing.source()
    slow = tailing.tail.open(source.job_id, "1-0")
    quick = tailing.tail.open(source.job_id, "1-0")
    for _ in range(20):
        await source.write(100)
        await take(quick, 100)
    assert quick.kept == 0
    assert 0 < slow.kept <= 256
    await source.end()
    assert await take(slow, 2001) == positions(1, 2001)


async def test_a_broker_that_is_away_only_delays(tailing: Tailing) -> None:
    source = await tailing.source()
    tailing.faults.down |= {"read", "read_after", "watch"}
    reader = tailing.tail.open(source.job_id, START)
    taking = asyncio.create_task(take(reader, 3))
    await eventually(lambda: tailing.faults.calls.count("read") >= 2)
    await source.write(1)
    tailing.faults.down.clear()
    assert await taking == ["0-1", *positions(0, 1)]


# -- logs that cannot be continued ------------------------------------------------------------------------------------


async def test_a_log_that_vanishes_is_lost_within_the_renewal_time(make_tail: MakeTail) -> None:
    tailing = await make_tail(lease_s=0.9)
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await lose_log(tailing.broker, source.job_id)
    with pytest.raises(LogLost):
        await take(reader, 1, within_s=0.9)


async def test_a_position_that_the_log_does_not_hold_is_lost(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-50")
    await source.write(3)
    await tailing.broker.release("r", source.job_id, 1, "1-3")
    await claim(tailing.broker, "r2")
    with pytest.raises(LogLost):
        await take(reader, 1)


async def test_a_position_inside_a_hole_is_lost(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-2")
    await append(tailing.broker, source.job_id, "1-4")
    await source.tell(source.entry(4))
    with pytest.raises(LogLost):
        await take(reader, 1)


async def test_a_hole_is_a_gap(tailing: Tailing) -> None:
    source = await tailing.source()
    reader = tailing.tail.open(source.job_id, "1-0")
    await source.write(1)
    await append(tailing.broker, source.job_id, "1-3")
    await source.tell(source.entry(3))
    assert await take(reader, 1) == ["1-1"]
    with pytest.raises(LogGap):
        await take(reader, 1)


# -- leaving ----------------------------------------------------------------------------------------------------------


async def test_of_two_readers_one_may_leave(tailing: Tailing) -> None:
    source = await tailing.source(grace_ms=0)
    one, two = tailing.tail.open(source.job_id, "1-0"), await tailing.tail.attach(source.job_id)
    tailing.tail.close_reader(one, None)
    await source.write(1)
    assert await take(two, 3) == ["0-1", *positions(0, 1)]
    assert "unwatch" not in tailing.faults.calls
    tailing.tail.close_reader(two, None)
    await eventually(lambda: "unwatch" in tailing.faults.calls)


@pytest.mark.parametrize(("grace_ms", "asked_ms"), [(0, None), (60_000, 0)])
async def test_a_leaving_reader_without_grace_cancels(tailing: Tailing, grace_ms: int, asked_ms: int | None) -> None:
    source = await tailing.source(grace_ms=grace_ms)
    tailing.tail.close_reader(tailing.tail.open(source.job_id, "1-0"), asked_ms)

    async def is_marked() -> bool:
        return [news.cancel for news in (await tick(tailing.broker)).news] == ["disconnect"]

    await eventually(is_marked, 1.0)


async def test_a_leaving_reader_with_grace_cancels_later(tailing: Tailing) -> None:
    source = await tailing.source(grace_ms=300)
    tailing.tail.close_reader(tailing.tail.open(source.job_id, "1-0"), None)
    await eventually(lambda: "unwatch" in tailing.faults.calls)
    assert (await reap(tailing.broker)).unread == 0

    async def is_marked() -> bool:
        return (await reap(tailing.broker)).unread == 1

    await eventually(is_marked, 1.0)


async def test_a_leaving_reader_may_leave_the_job_running(tailing: Tailing) -> None:
    kept, dropped = await tailing.source(grace_ms=200), await tailing.source(grace_ms=200)
    for source, grace_ms in ((kept, -1), (dropped, None)):
        tailing.tail.close_reader(tailing.tail.open(source.job_id, "1-0"), grace_ms)

    async def marks() -> bool:
        return (await reap(tailing.broker)).unread == 1

    await eventually(marks)
    assert [news.job_id for news in (await tick(tailing.broker)).news if news.cancel] == [dropped.job_id]


async def test_a_reader_that_comes_back_while_the_leaving_fails_stays(tailing: Tailing) -> None:
    source = await tailing.source(grace_ms=0)
    held = tailing.faults.held["unwatch"] = asyncio.Event()
    tailing.faults.fail("unwatch", "before")
    tailing.tail.close_reader(tailing.tail.open(source.job_id, "1-0"), None)
    await eventually(lambda: "unwatch" in tailing.faults.calls)
    attaching = asyncio.create_task(tailing.tail.attach(source.job_id))
    await eventually(lambda: tailing.tail.readers == 1)
    held.set()
    reader = await attaching
    other = await tailing.source(grace_ms=0)
    tailing.tail.close_reader(tailing.tail.open(other.job_id, "1-0"), None)

    async def has_left() -> bool:
        return [news.job_id for news in (await tick(tailing.broker)).news if news.cancel] == [other.job_id]

    await eventually(has_left)
    await source.write(1)
    assert await take(reader, 3) == ["0-1", *positions(0, 1)]


async def test_a_leaving_that_failed_is_tried_again(tailing: Tailing) -> None:
    job_id = await admit(tailing.broker, pod="pod", grace_ms=0)
    tailing.faults.fail("unwatch", "before", "after")
    tailing.tail.close_reader(tailing.tail.open(job_id, "0-1"), None)

    async def is_cancelled() -> bool:
        return await state_of(tailing.broker, job_id) == "cancelled"

    await eventually(is_cancelled)


async def test_a_tail_that_closes_has_left(tailing: Tailing) -> None:
    job_id = await admit(tailing.broker, pod="pod", grace_ms=0)
    tailing.tail.close_reader(tailing.tail.open(job_id, "0-1"), None)
    await tailing.tail.close()
    assert (await end_of(tailing.broker, job_id))[1] == "cancelled"


# -- reading leases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_shaky", [False, True])
async def test_a_job_that_is_read_lives_as_long_as_it_is_read(make_tail: MakeTail, is_shaky: bool) -> None:
    tailing = await make_tail(lease_s=1.0)
    if is_shaky:
        faults: list[Fault] = ["none", "before"]
        tailing.faults.fail("watch", *(faults * 3))
    source = await tailing.source(grace_ms=0)
    tailing.tail.open(source.job_id, "1-0")
    until = asyncio.get_running_loop().time() + 2.5

    async def is_over() -> bool:
        assert (await reap(tailing.broker)).unread == 0
        return asyncio.get_running_loop().time() > until

    await eventually(is_over)
    assert [news.cancel for news in (await tick(tailing.broker)).news if news.cancel] == []


async def test_an_ended_log_lives_as_long_as_it_is_read(make_broker: MakeBroker) -> None:
    broker = await make_broker(reader_lease_s=0.9, log_ttl_s=0.2)
    job_id = await admit(broker, pod="pod")
    await claim(broker)
    await broker.watch("pod", [job_id])
    await settle(broker, job_id, 1, "1-0")
    assert await broker.watch("pod", [job_id]) == [True]
    until = asyncio.get_running_loop().time() + 0.6  # two renewals' time

    async def is_over() -> bool:
        assert await broker.last_id(job_id) == "1-1"
        return asyncio.get_running_loop().time() > until

    await eventually(is_over)


async def test_a_reader_that_fails_to_attach_leaves_nothing(tailing: Tailing) -> None:
    source = await tailing.source()
    tailing.faults.fail("watch", "before")
    with pytest.raises(BrokerDown):
        await tailing.tail.attach(source.job_id)
    assert tailing.tail.readers == 0
