"""The log's writer: every entry once, in order, without a gap, whatever fails when; and nothing once it is fenced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from headrace.broker.errors import BrokerDown
from headrace.broker.messages import Delta, Ended, Started
from headrace.broker.protocol import Broker, Claim
from headrace.broker.writer import LogWriter, Track
from tests.broker.steps import Ears, admit, claim, end_of, ids_of, last_id, log_of, tokens_of, unknown_id
from tests.faults import Fault, FaultyBroker
from tests.support import eventually

DONE = Ended("done")


@dataclass
class Writing:
    """A running writer on a lane that breaks as told."""

    broker: Broker
    faults: FaultyBroker
    writer: LogWriter
    losses: list[str] = field(default_factory=list)

    def open(self, job_id: str, attempt: int = 1, readers: Iterable[str] = ()) -> Track:
        return self.writer.open(job_id, attempt, 0, readers, lambda: self.losses.append(job_id))

    async def track(self, *readers: str) -> Track:
        """Begin the first attempt of a new job."""
        claimed = await claim_one(self.broker)
        return self.open(claimed.job.id, claimed.attempt, readers)


@asynccontextmanager
async def running(broker: Broker, pace_s: float = 0.0) -> AsyncIterator[Writing]:
    faults = FaultyBroker(broker)
    writer = LogWriter(faults.broker, 0, pace_s)
    task = asyncio.create_task(writer.run())
    yield Writing(broker, faults, writer)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def writing(broker: Broker) -> AsyncIterator[Writing]:
    async with running(broker) as begun:
        yield begun


@pytest.fixture
async def paced(broker: Broker) -> AsyncIterator[Writing]:
    """At a pace of an hour: a batch is early, or urgent, or not written."""
    async with running(broker, 3600.0) as begun:
        yield begun


async def claim_one(broker: Broker) -> Claim:
    await admit(broker)
    return await claim(broker)


async def steal(broker: Broker, job_id: str) -> Claim:
    """Another replica takes the job over, as it does when a lease has run out."""
    await broker.release("r", job_id, None, None)
    claimed = await claim(broker, "thief")
    assert claimed.job.id == job_id
    return claimed


def delta(index: int) -> Delta:
    return Delta(0, str(index), [index])


def is_gap_free(ids: Iterable[str], attempt: int) -> bool:
    numbers = [int(each.partition("-")[2]) for each in ids if each.startswith(f"{attempt}-")]
    return numbers == list(range(len(numbers)))


# -- entries ----------------------------------------------------------------------------------------------------------


async def test_what_is_appended_while_a_batch_is_under_way_is_one_entry(writing: Writing) -> None:
    track = await writing.track()
    writing.faults.gate.clear()
    track.append([delta(0)])
    await eventually(lambda: len(writing.faults.sent) == 1)
    track.append([delta(1)])
    track.append([delta(2), delta(3)])
    writing.faults.gate.set()
    await track.clear()
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0", "1-1", "1-2"]
    assert tokens_of(await log_of(writing.broker, track.job_id)) == [0, 1, 2, 3]


async def test_steps_that_come_faster_than_the_pace_share_batches_and_what_is_urgent_does_not_wait(
    paced: Writing,
) -> None:
    tracks, faults = [await paced.track() for _ in range(2)], paced.faults
    for track in tracks:  # the first batch and one that is early
        track.append([delta(0)])
        await track.clear()
    for index in (1, 2, 3):
        tracks[0].append([delta(index)])
        await asyncio.sleep(0)
    assert len(faults.sent) == 2
    tracks[1].append([delta(1)], is_urgent=True)
    await asyncio.gather(*(track.clear() for track in tracks))
    assert len(faults.sent) == 3
    assert await ids_of(paced.broker, tracks[0].job_id) == ["0-1", "1-0", "1-1", "1-2"]
    assert await tracks[0].settle(DONE) == "ok"


@pytest.mark.parametrize(
    "faults",
    [
        ["before"],
        ["after"],
        ["partial"],
        ["none", "after", "before", "partial"],
        ["before", "before", "after", "none", "partial", "after"],
    ],
    ids=lambda faults: "+".join(faults),
)
async def test_entries_appear_once_and_in_order_whatever_fails(writing: Writing, faults: list[Fault]) -> None:
    tracks = [await writing.track() for _ in range(3)]
    writing.faults.fail("exchange", *faults)
    for index in range(8):
        for track in tracks:
            track.append([delta(index)])
        await asyncio.sleep(0)
    assert await asyncio.gather(*(track.settle(DONE) for track in tracks)) == ["ok"] * 3
    for track in tracks:
        assert tokens_of(await log_of(writing.broker, track.job_id)) == list(range(8))
        assert is_gap_free(await ids_of(writing.broker, track.job_id), 1)
        assert (await end_of(writing.broker, track.job_id))[1] == "done"
    assert writing.losses == []


async def test_a_log_that_cannot_be_asked_is_asked_until_it_answers(writing: Writing) -> None:
    track = await writing.track()
    writing.faults.fail("exchange", "after", "before")
    writing.faults.fail("last_ids", "before", "before", "none", "before")
    track.append([delta(0)])
    assert await track.settle(DONE) == "ok"
    assert tokens_of(await log_of(writing.broker, track.job_id)) == [0]


async def test_many_jobs_share_an_exchange_with_one_entry_each(writing: Writing) -> None:
    tracks = [await writing.track() for _ in range(40)]
    writing.faults.gate.clear()
    for index in range(3):
        for track in tracks:
            track.append([delta(index)])
        await eventually(lambda: len(writing.faults.sent) == 1)
    writing.faults.gate.set()
    await asyncio.gather(*(track.clear() for track in tracks))
    assert [len(sent.appends) for sent in writing.faults.sent] == [40, 40]
    for sent in writing.faults.sent:
        assert len({append.job_id for append in sent.appends}) == len(sent.appends)


async def test_an_entry_says_when_it_was_made(writing: Writing) -> None:
    claimed = await claim_one(writing.broker)
    track = writing.writer.open(claimed.job.id, 1, 60_000, [], lambda: None)
    track.append([delta(0)])
    await track.clear()
    assert 60_000 <= (await log_of(writing.broker, track.job_id))[-1].at_ms < 65_000


# -- clear ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["none", "before", "after", "partial"])
async def test_clear_returns_when_all_is_acknowledged(writing: Writing, fault: Fault) -> None:
    track = await writing.track()
    writing.faults.fail("exchange", fault)
    track.append([delta(0)])
    async with asyncio.timeout(5):
        await track.clear()
    assert track.is_clear
    assert track.last == "1-1"


async def test_clear_returns_to_all_who_wait(writing: Writing) -> None:
    track = await writing.track()
    writing.faults.gate.clear()
    track.append([delta(0)])
    waiting = [asyncio.create_task(track.clear()) for _ in range(3)]
    await eventually(lambda: len(writing.faults.sent) == 1)
    waiting[1].cancel()
    writing.faults.gate.set()
    async with asyncio.timeout(5):
        await asyncio.gather(waiting[0], waiting[2])


async def test_clear_returns_when_the_log_is_lost(writing: Writing) -> None:
    track = await writing.track()
    await steal(writing.broker, track.job_id)
    track.append([delta(0)])
    async with asyncio.timeout(5):
        await track.clear()
    assert track.is_lost


# -- hints ------------------------------------------------------------------------------------------------------------


async def test_only_acknowledged_entries_are_hinted(writing: Writing, ears: Ears) -> None:
    pod = await ears.pod(writing.broker, "p")
    track = await writing.track("p")
    writing.faults.gate.clear()
    track.append([delta(0)])
    await eventually(lambda: len(writing.faults.sent) == 1)
    assert writing.faults.sent[0].hints == []
    writing.faults.gate.set()
    await eventually(lambda: pod.ids == ["1-1"])


async def test_what_the_log_refused_is_never_hinted(writing: Writing, ears: Ears) -> None:
    pod = await ears.pod(writing.broker, "p")
    track, other = await writing.track("p"), await writing.track("p")
    await steal(writing.broker, track.job_id)
    track.append([delta(0)])
    other.append([delta(1)])
    await eventually(lambda: writing.losses == [track.job_id])
    await eventually(lambda: pod.heard)
    assert {heard.job_id for heard in pod.heard} == {other.job_id}


@pytest.mark.parametrize("fault", ["before", "after", "partial"])
async def test_hints_keep_their_order_and_say_nothing_twice(writing: Writing, ears: Ears, fault: Fault) -> None:
    pod = await ears.pod(writing.broker, "p")
    track = await writing.track("p")
    writing.faults.fail("exchange", "none", "none", fault, "none", fault)
    while writing.faults.plan["exchange"]:
        track.append([delta(0)])
        await asyncio.sleep(0)
    await track.clear()
    track.append([delta(1)])  # the hint of the one before may have been in the exchange that failed
    await eventually(lambda: pod.ids and pod.ids[-1] == track.last)
    numbers = [int(each.partition("-")[2]) for each in pod.ids]
    assert numbers == sorted(set(numbers))


async def test_a_deaf_pod_is_told_nothing_for_a_second_and_then_again(writing: Writing, ears: Ears) -> None:
    loop = asyncio.get_running_loop()
    track = await writing.track("p")
    track.append([delta(0)])
    await eventually(lambda: [hint.pod for sent in writing.faults.sent for hint in sent.hints] == ["p"])
    muted_at = loop.time()
    await eventually(lambda: "p" in writing.writer._muted)
    pod = await ears.pod(writing.broker, "p")

    async def is_heard() -> bool:
        track.append([delta(1)])
        await track.clear()
        return bool(pod.heard)

    await eventually(is_heard)
    assert 0.9 < loop.time() - muted_at < 2.0


async def test_hints_go_with_the_next_entries_where_these_follow_closely(paced: Writing, ears: Ears) -> None:
    pod = await ears.pod(paced.broker, "p")
    track, faults = await paced.track("p"), paced.faults
    for index in range(3):
        track.append([delta(index)], is_urgent=True)
        await track.clear()
    await eventually(lambda: pod.ids == ["1-1", "1-2"])  # the first ones are shown at once
    assert [len(sent.appends) for sent in faults.sent if sent.appends] == [1, 1, 1]
    track.append([delta(3)], is_urgent=True)
    await eventually(lambda: pod.ids == ["1-1", "1-2", "1-3"])
    assert (len(faults.sent[-1].hints), len(faults.sent[-1].appends)) == (1, 1)


async def test_what_an_attempt_begins_with_goes_with_its_first_step(paced: Writing) -> None:
    track = await paced.track()
    track.begin(Started(3))
    for _ in range(9):
        await asyncio.sleep(0)
    assert paced.faults.sent == []
    track.append([delta(0)], is_urgent=True)
    await track.clear()
    assert await ids_of(paced.broker, track.job_id) == ["0-1", "1-0", "1-1"]


async def test_readers_that_change_are_told_from_then_on(writing: Writing, ears: Ears) -> None:
    one, two = await ears.pod(writing.broker, "one"), await ears.pod(writing.broker, "two")
    track = await writing.track("one")
    track.append([delta(0)])
    await eventually(lambda: one.ids == ["1-1"])
    track.readers = {"two"}
    track.append([delta(1)])
    await eventually(lambda: two.ids == ["1-2"])
    assert one.ids == ["1-1"]


# -- fencing ----------------------------------------------------------------------------------------------------------


async def test_a_fenced_writer_stops_and_says_so_once(writing: Writing) -> None:
    track = await writing.track()
    track.append([delta(0)])
    await track.clear()
    await steal(writing.broker, track.job_id)
    track.append([delta(1)])
    await eventually(lambda: track.is_lost)
    track.append([delta(2)])
    assert await track.settle(DONE) == "stale"
    track.lose("stale")
    assert writing.losses == [track.job_id]
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0", "1-1", "2-0"]


@pytest.mark.parametrize("fault", ["before", "after"])
async def test_a_settle_that_is_too_late_answers_stale(writing: Writing, fault: Fault) -> None:
    track = await writing.track()
    await steal(writing.broker, track.job_id)
    writing.faults.fail("exchange", fault)
    assert await track.settle(DONE) == "stale"
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0", "2-0"]
    assert writing.losses == [track.job_id]


async def test_a_log_that_is_gone_loses_its_track(writing: Writing) -> None:
    track = writing.open(unknown_id())
    track.append([delta(0)])
    assert await track.settle(DONE) == "gone"
    assert writing.losses == [track.job_id]


async def test_a_track_that_was_lost_meanwhile_writes_nothing_after_a_break(writing: Writing) -> None:
    track, other = await writing.track(), await writing.track()
    writing.faults.down.add("exchange")
    track.append([delta(0)])
    other.append([delta(0)])
    await eventually(lambda: "last_ids" in writing.faults.calls)
    await writing.broker.release("r", track.job_id, None, None)
    track.lose("stale")
    writing.faults.down.clear()
    await other.clear()
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0"]


async def test_the_end_of_an_old_attempt_leaves_the_new_one_of_the_same_replica_alone(writing: Writing) -> None:
    old = await writing.track()
    await writing.broker.release("r", old.job_id, None, None)
    claimed = await claim(writing.broker)
    new = writing.open(old.job_id, claimed.attempt)
    new.append([delta(0)])
    writing.writer.close_track(old)
    async with asyncio.timeout(5):
        await new.clear()
    assert await ids_of(writing.broker, new.job_id) == ["0-1", "1-0", "2-0", "2-1"]


async def test_an_answer_to_an_old_attempt_says_nothing_of_the_new_one(writing: Writing) -> None:
    old = await writing.track()
    writing.faults.gate.clear()
    old.append([delta(0)])
    await eventually(lambda: len(writing.faults.sent) == 1)
    old.lose("stale")
    claimed = await steal(writing.broker, old.job_id)
    new = writing.open(old.job_id, claimed.attempt)
    writing.faults.gate.set()
    new.append([delta(1)])
    assert await new.settle(DONE) == "ok"
    assert await ids_of(writing.broker, new.job_id) == ["0-1", "1-0", "2-0", "2-1", "2-2"]


# -- settle -----------------------------------------------------------------------------------------------------------


async def test_settle_waits_for_what_is_not_acknowledged_yet(writing: Writing) -> None:
    track = await writing.track()
    writing.faults.gate.clear()
    track.append([delta(0)])
    await eventually(lambda: len(writing.faults.sent) == 1)
    track.append([delta(1)])
    settled = track.settle(DONE)
    writing.faults.gate.set()
    assert await settled == "ok"
    assert [(len(sent.appends), len(sent.settles)) for sent in writing.faults.sent] == [(1, 0), (1, 0), (0, 1)]
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0", "1-1", "1-2", "1-3"]


async def test_a_settle_whose_answer_was_lost_is_ok(writing: Writing) -> None:
    track = await writing.track()
    track.append([delta(0)])
    await track.clear()
    writing.faults.fail("exchange", "after", "after")
    assert await track.settle(DONE) == "ok"
    assert (await end_of(writing.broker, track.job_id))[:2] == ("1-2", "done")


async def test_a_settle_while_the_broker_is_away_is_done_when_it_is_back(writing: Writing) -> None:
    track = await writing.track()
    writing.faults.down |= {"exchange", "last_ids"}
    track.append([delta(0)])
    settled = track.settle(DONE)
    await eventually(lambda: writing.faults.calls.count("last_ids") >= 3)
    assert not settled.done()
    with pytest.raises(BrokerDown):
        await last_id(writing.faults.broker, track.job_id)
    writing.faults.down.clear()
    assert await settled == "ok"
    assert await ids_of(writing.broker, track.job_id) == ["0-1", "1-0", "1-1", "1-2"]
