"""The law of the writer: any schedule of appends, failures and takeovers leaves a gap-free prefix of each attempt."""

from __future__ import annotations

import asyncio
from typing import Literal, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker import messages
from headrace.broker.keys import position
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Claimed, Delta, Ended, ReadEntry
from headrace.broker.settings import QueueSettings
from headrace.broker.tail import START, follow
from headrace.broker.writer import LogWriter, Track
from tests import jumping
from tests.broker.steps import Pod, admit, claim, log_of, tokens_of
from tests.faults import Fault, FaultyBroker
from tests.support import eventually

Act = Literal["append", "turn", "answer", "steal", "retake"]

ACTS = st.lists(st.sampled_from(["append", "append", "append", "turn", "answer", "steal", "retake"]), max_size=40)
FAULTS = st.lists(st.sampled_from(["none", "none", "before", "after", "partial"]), max_size=12)


class Play:
    """One job, its attempts, and what each was told to write; all of them go on as if they knew of no other."""

    def __init__(self, broker: MemoryBroker, faults: FaultyBroker) -> None:
        self._broker = broker
        self._faults = faults
        self._writers: list[LogWriter] = []
        self._running: list[asyncio.Task[None]] = []
        self.job_id = ""
        self.tracks: list[Track] = []
        self.written: list[list[int]] = []
        self.losses: list[int] = []
        self._made = 0

    def new_replica(self) -> None:
        self._writers.append(writer := LogWriter(self._faults.broker, 0))
        self._running.append(asyncio.create_task(writer.run()))

    async def take(self) -> None:
        """The newest replica claims the job, whoever has it."""
        attempt = len(self.tracks) + 1
        if self.tracks:
            await self._broker.release("r", self.job_id, None, None)
        claimed = await claim(self._broker, "r")
        self.job_id = claimed.job.id
        track = self._writers[-1].open(
            self.job_id, claimed.attempt, 0, claimed.readers, lambda: self.losses.append(attempt)
        )
        self.tracks.append(track)
        self.written.append([])

    async def act(self, act: Act) -> None:
        match act:
            case "append":
                for track, written in zip(self.tracks, self.written, strict=True):
                    track.append([Delta(0, "", [self._made])])
                    written.append(self._made)
                    self._made += 1
            case "turn":
                await asyncio.sleep(0)
            case "answer":
                self._faults.gate.set()
                await asyncio.sleep(0.01)
                self._faults.gate.clear()
            case "steal":
                self.new_replica()
                await self.take()
            case "retake":
                await self.take()

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def attempts_of(entries: list[ReadEntry]) -> dict[int, list[ReadEntry]]:
    attempts: dict[int, list[ReadEntry]] = {}
    for entry in entries:
        attempts.setdefault(position(entry.id)[0], []).append(entry)
    return attempts


def check_log(entries: list[ReadEntry], written: list[list[int]]) -> None:
    """A reader can follow it from its start; each attempt wrote a prefix of its own, the last one all and an end."""
    at = START
    for entry in entries:
        assert at == START or follow(at, entry) == "next"
        at = entry.id
    attempts = attempts_of(entries)
    assert list(attempts) == list(range(len(written) + 1))
    for attempt, own in enumerate(written, 1):
        logged = tokens_of(attempts[attempt])
        assert isinstance(attempts[attempt][0].events[0], Claimed)
        assert logged == own[: len(logged)]
    assert tokens_of(attempts[len(written)]) == written[-1]
    assert [entry.is_end for entry in entries] == [False] * (len(entries) - 1) + [True]


async def play(acts: list[Act], faults: list[Fault], asking: list[Fault]) -> None:
    broker = MemoryBroker(QueueSettings())
    faulty = FaultyBroker(broker)
    faulty.fail("exchange", *faults)
    faulty.fail("last_ids", *asking)
    faulty.gate.clear()
    pod = Pod()
    listener = broker.listen_hints("p", pod.on_hint, pod.on_gap)
    game = Play(broker, faulty)
    game.new_replica()
    await admit(broker, pod="p")
    await game.take()
    for act in acts:
        await game.act(act)
    faulty.gate.set()
    answers = await asyncio.gather(*(track.settle(Ended("done")) for track in game.tracks))
    assert answers == ["stale"] * (len(answers) - 1) + ["ok"]
    assert sorted(game.losses) == list(range(1, len(answers)))
    entries = await log_of(broker, game.job_id)
    check_log(entries, game.written)
    await eventually(lambda: pod.ids[-1:] == [entries[-1].id])
    check_hints(pod, entries)
    await game.close()
    await listener.close()


def check_hints(pod: Pod, entries: list[ReadEntry]) -> None:
    """Nothing is said that the log does not hold, and nothing twice; each attempt's entries are said in order."""
    logged = {entry.id: entry for entry in entries}
    for heard in pod.heard:
        assert messages.decode_entry(heard.entry_id, heard.data) == logged[heard.entry_id]
    assert len(set(pod.ids)) == len(pod.ids)
    for attempt in {position(each)[0] for each in pod.ids}:
        own = [position(each) for each in pod.ids if position(each)[0] == attempt]
        assert own == sorted(own)


@given(acts=ACTS, faults=FAULTS, asking=FAULTS)
@settings(deadline=None)
def test_any_schedule_leaves_one_gap_free_log(acts: list[str], faults: list[Fault], asking: list[Fault]) -> None:
    jumping.run(play(cast(list[Act], acts), faults, asking))
