"""Jobs that are held ahead: they start when a slot comes free, leave without harm, and go back if none does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from headrace.broker import keys
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import NOTHING_SAID, Admission, Asking, Claims
from headrace.broker.settings import QueueSettings, Settings, WorkerSettings
from headrace.workers import seats as seats_module
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.worker import Worker
from tests.cluster.virtual import VirtualLoop
from tests.support import eventually
from tests.workers.replicas import MakeStage

SLOTS, JOBS = 4, 200


class Watched(ScriptedEngine):
    """It notes how many sequences each step had, and when each job became the engine's."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.batches: Counter[float] = Counter()
        self.running = self.most = 0
        self.began_s: dict[str, float] = {}

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        self.running += 1
        self.most = max(self.most, self.running)
        self.began_s[generation.job.id] = asyncio.get_running_loop().time()

        def noted(step: Step) -> None:
            self.batches[round(asyncio.get_running_loop().time(), 4)] += 1
            self.running -= step.end is not None
            emit(step)

        return super().start(generation, noted, fail)


class FarAway(MemoryBroker):
    """Every claim takes 10 ms."""

    def __init__(self, queue: QueueSettings) -> None:
        super().__init__(queue, clock=lambda: 10**12 + round(1000 * asyncio.get_running_loop().time()))
        self.claimed_s: dict[str, float] = {}

    async def claim(
        self, shard: int, replica: str, models: str | Sequence[str], count: int, asking: Asking = NOTHING_SAID
    ) -> Claims:
        await asyncio.sleep(0.005)
        claims = await super().claim(shard, replica, models, count, asking)
        for claim in claims:
            self.claimed_s[claim.job.id] = asyncio.get_running_loop().time()
        await asyncio.sleep(0.005)
        return claims


async def long_queue() -> tuple[Watched, dict[str, float]]:
    """Many jobs of four steps of 5 ms, which is twice the time of a claim; and how long each was held."""
    model = ScriptedModel(name="m", slots=SLOTS, tokens_per_s=200)
    engine, broker = Watched(model), FarAway(QueueSettings(lease_s=1e4))
    worker = Worker(Settings([model], worker=WorkerSettings(step_timeout_s=1e6)), model, broker, engine)
    await worker.start()
    await broker.present("cluster", "test", "m", {})
    for number in range(JOBS):
        job = Job(keys.new_job_id(1), "m", Text(f"job {number}"), max_tokens=4)
        await broker.admit(Admission(job, View("a", "m", "openai.chat")))
    running = asyncio.create_task(worker.run())
    while (await broker.stats("m")).waiting["default"]:  # noqa: ASYNC110  # virtual seconds
        await asyncio.sleep(0.1)
    await worker.drain()
    await running
    return engine, {job_id: at - broker.claimed_s[job_id] for job_id, at in engine.began_s.items()}


def test_with_a_long_queue_the_batch_stays_full_and_no_job_is_claimed_long_before_it_can_run() -> None:
    """In virtual time. If each slot waited for its claim, a third of all would be empty."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        engine, held_s = runner.run(long_queue())
    times = sorted(engine.batches)
    steady = [engine.batches[at] for at in times[len(times) // 4 : -len(times) // 4]]
    assert sum(steady) > 0.95 * SLOTS * (times[-len(times) // 4] - times[len(times) // 4]) * 200
    assert engine.most == SLOTS
    assert len(held_s) == JOBS
    later = sorted(list(held_s.values())[20:])
    assert later[len(later) * 9 // 10] < 0.03  # a job and a half; all would be claimed at the begin if many were held


async def test_a_job_for_which_no_slot_comes_free_goes_back(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats_module, "PATIENCE_S", 0.05)
    stage = await make_stage(slots=1)
    replica = await stage.replica()
    pace = replica.worker._seats.pace
    pace.ahead = lambda slots: 1  # type: ignore[method-assign]
    first, second = await stage.admit(), await stage.admit()
    await replica.run(0)
    pace.ahead = lambda slots: 0  # type: ignore[method-assign]

    async def is_back() -> bool:
        return await stage.state(second) == "waiting"

    await eventually(is_back)
    assert await stage.state(first) == "running"
    assert len(replica.hand.runs) == 1
    (await replica.run(0)).say("a", end="eos")
    (await replica.run(1)).say("b", end="eos")
    assert (await stage.ended(second)).status == "done"


async def test_a_job_that_is_cancelled_while_it_is_held_leaves_no_hole(make_stage: MakeStage) -> None:
    stage = await make_stage(slots=1)
    replica = await stage.replica()
    replica.worker._seats.pace.ahead = lambda slots: 1  # type: ignore[method-assign]
    first, second, third = [await stage.admit() for _ in range(3)]
    await replica.run(0)

    async def is_held() -> bool:
        return await stage.state(second) == "running"

    await eventually(is_held)
    await stage.plain.cancel(second, "test")
    assert (await stage.ended(second)).status == "cancelled"
    (await replica.run(0)).say("a", end="eos")
    (await replica.run(1)).say("b", end="eos")
    for job_id in (first, third):
        assert (await stage.ended(job_id)).status == "done"
