"""Reading leases: what it means for a job that readers stay, leave, or come back."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.errors import BrokerDown
from tests.broker.steps import (
    MakeBroker,
    admit,
    claim,
    end_of,
    last_id,
    reap,
    settle,
    state_of,
    tick,
)
from tests.broker.tailing import MakeTail, Tailing, positions, take
from tests.faults import Fault
from tests.support import eventually

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


async def test_who_has_read_to_the_end_leaves_without_a_word(tailing: Tailing) -> None:
    source, other = await tailing.source(grace_ms=0), await tailing.source(grace_ms=0)
    reader, early = tailing.tail.open(source.job_id, "1-0"), tailing.tail.open(other.job_id, "1-0")
    await source.write(1)
    await source.end()
    assert await take(reader, 2) == ["1-1", "1-2"]
    tailing.tail.close_reader(reader, None)
    tailing.tail.close_reader(early, None)
    assert list(tailing.tail._leaving) == [other.job_id]


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
        shaky: list[Fault] = ["none", "before"]
        tailing.faults.fail("watch", *shaky * 3)
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
        assert await last_id(broker, job_id) == "1-1"
        return asyncio.get_running_loop().time() > until

    await eventually(is_over)


async def test_a_reader_that_fails_to_attach_leaves_nothing(tailing: Tailing) -> None:
    source = await tailing.source()
    tailing.faults.fail("watch", "before")
    with pytest.raises(BrokerDown):
        await tailing.tail.attach(source.job_id)
    assert tailing.tail.readers == 0
