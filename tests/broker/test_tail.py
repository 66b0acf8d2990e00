"""The log's reader: whatever becomes of hints and connections, each reader gets every entry once and in order."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.errors import JobNotFound, LogGap, LogLost
from headrace.broker.tail import START, Reader
from tests.broker.steps import (
    append,
    claim,
    lose_log,
    unknown_id,
)
from tests.broker.tailing import MakeTail, Source, Tailing, positions, take
from tests.support import eventually

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
