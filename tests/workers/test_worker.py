"""A replica: it claims, runs and settles; it hears cancels in time; and whatever breaks, no job and no slot is lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from headrace.broker.errors import EngineFailed
from headrace.broker.memory import MemoryBroker
from headrace.broker.settings import QueueSettings, ScriptedModel
from headrace.workers.engines.scripted import ScriptedEngine
from tests.faults import Fault
from tests.support import eventually
from tests.workers.replicas import HandEngine, Stage, oracle_text

TICK_S = 0.1
WITHIN_S = 0.6
"""Three times what the design allows from a mark to the engine's cancel."""

MakeStage = Callable[..., Awaitable[Stage]]


def scripted(tokens_per_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=tokens_per_s))


@pytest.fixture
async def make_stage() -> AsyncIterator[MakeStage]:
    stages: list[Stage] = []

    async def make(
        *, slots: int = 4, lease_s: float = 5.0, max_deaths: int = 3, max_run_s: float = 3600.0, **worker: float
    ) -> Stage:
        queue = QueueSettings(lease_s=lease_s, max_deaths=max_deaths, max_run_s=max_run_s)
        stages.append(stage := Stage(MemoryBroker(queue), slots=slots, queue=queue, **worker))
        return stage

    yield make
    for stage in stages:
        await stage.close()


@pytest.fixture
async def stage(make_stage: MakeStage) -> Stage:
    return await make_stage()


# -- claim, run, settle -----------------------------------------------------------------------------------------------


async def test_jobs_run_to_their_end(stage: Stage) -> None:
    replica = await stage.replica(scripted())
    job_ids = [await stage.admit(f"job {i}", max_tokens=20) for i in range(10)]
    for i, job_id in enumerate(job_ids):
        ended = await stage.ended(job_id)
        assert (ended.status, ended.error) == ("done", None)
        assert await stage.text(job_id) == oracle_text(f"job {i}", 20)
    await eventually(lambda: replica.worker.running == 0)


async def test_no_more_jobs_run_than_there_are_slots(make_stage: MakeStage) -> None:
    stage = await make_stage(slots=2)
    replica = await stage.replica()
    job_ids = [await stage.admit() for _ in range(3)]
    first, second = await replica.run(0), await replica.run(1)
    assert [await stage.state(job_id) for job_id in job_ids] == ["running", "running", "waiting"]
    first.say("a", end="eos")
    assert (await stage.ended(job_ids[0])).status == "done"
    third = await replica.run(2)
    for run in (second, third):
        run.say("b", end="eos")
    for job_id in job_ids:
        assert (await stage.ended(job_id)).status == "done"


async def test_a_slot_that_comes_free_is_filled_at_once(make_stage: MakeStage) -> None:
    stage = await make_stage(slots=1)
    replica = await stage.replica()
    await stage.admit()
    run = await replica.run(0)
    await stage.admit()
    run.say("a", end="eos")
    await eventually(lambda: len(replica.hand.runs) == 2, 0.1)


async def test_a_job_is_taken_as_soon_as_it_is_there(stage: Stage) -> None:
    replica = await stage.replica()
    await eventually(lambda: "claim" in stage.faults.calls)
    await stage.admit()
    await eventually(lambda: len(replica.hand.runs) == 1, 0.1)


async def test_a_lost_wake_up_costs_a_second(stage: Stage) -> None:
    replica = await stage.replica()
    await eventually(lambda: "claim" in stage.faults.calls)
    stage.plain._shards[0]._idle.clear()  # type: ignore[attr-defined]  # as if the message had not arrived
    await stage.admit()
    await eventually(lambda: len(replica.hand.runs) == 1, 1.5)


# -- cancel -----------------------------------------------------------------------------------------------------------


async def test_d1_a_cancel_reaches_the_engine_and_frees_the_slot(make_stage: MakeStage) -> None:
    stage = await make_stage(slots=1)
    replica = await stage.replica()
    job_id, next_id = await stage.admit(), await stage.admit()
    run = await replica.run(0)
    run.say("a")
    assert await stage.plain.cancel(job_id, "test") == "running"
    async with asyncio.timeout(WITHIN_S):
        await run.cancelled.wait()
    run.say("b")
    assert (await stage.ended(job_id)).status == "cancelled"
    assert await stage.text(job_id) == "a"
    await eventually(lambda: len(replica.hand.runs) == 2, 0.1)
    assert await stage.state(next_id) == "running"


async def test_d1_a_cancel_before_the_engine_has_begun(stage: Stage) -> None:
    replica = await stage.replica()
    replica.hand.encoding.clear()
    job_id = await stage.admit()
    await eventually(lambda: replica.worker.running == 1)
    await stage.plain.cancel(job_id, "test")
    ended = await stage.ended(job_id, WITHIN_S)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("cancelled", "cancelled")
    replica.hand.encoding.set()
    await eventually(lambda: replica.worker.running == 0)
    assert replica.hand.runs == []


async def test_d2_a_waiting_job_that_is_cancelled_is_never_started(make_stage: MakeStage) -> None:
    stage = await make_stage(slots=1)
    replica = await stage.replica()
    ids = [await stage.admit(text) for text in ("A", "B", "C")]
    run = await replica.run(0)
    assert await stage.plain.cancel(ids[1], "test") == "waiting"
    run.say("a", end="eos")
    (await replica.run(1)).say("c", end="eos")
    assert [(await stage.ended(job_id)).status for job_id in ids] == ["done", "cancelled", "done"]
    assert [run.generation.prompt for run in replica.hand.runs] == [
        job.prompt for job in (await _job(stage, ids[0]), await _job(stage, ids[2]))
    ]


async def _job(stage: Stage, job_id: str):  # type: ignore[no-untyped-def]
    return stage.plain._of(job_id)._jobs[job_id].admission.job  # type: ignore[attr-defined]


async def test_readers_that_come_are_told_from_the_next_tick_on(stage: Stage) -> None:
    heard: list[bytes] = []
    listener = stage.plain.listen_hints("late", heard.append, lambda: None)
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    await stage.plain.watch("late", [job_id])

    def is_heard() -> bool:
        run.say("a")
        return bool(heard)

    await eventually(is_heard, WITHIN_S)
    await listener.close()


# -- the wall limit ---------------------------------------------------------------------------------------------------


async def test_a_job_that_runs_for_too_long_is_stopped_and_fails(make_stage: MakeStage) -> None:
    stage = await make_stage(max_run_s=0.3, lease_s=0.2)
    replica = await stage.replica()
    job_id, late_id = await stage.admit(), await stage.admit()
    run, late = await replica.run(0), await replica.run(1)
    while not run.is_cancelled:
        run.say("a")
        await asyncio.sleep(0.02)
    for each in (job_id, late_id):
        ended = await stage.ended(each)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", "run_timeout")
    assert late.is_cancelled
    assert set(await stage.text(job_id)) == {"a"}
    await eventually(lambda: replica.worker.running == 0)
    status = await stage.plain.status(job_id)
    assert status is not None
    assert (status.attempt, status.deaths) == (1, 0)


# -- draining ---------------------------------------------------------------------------------------------------------


async def test_a_drain_finishes_what_it_can(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=5.0)
    replica = await stage.replica(scripted(tokens_per_s=100))
    job_id = await stage.admit(max_tokens=20)
    await eventually(lambda: replica.worker.running == 1)
    waiting = asyncio.create_task(replica.drain())
    await eventually(lambda: replica.worker._is_draining)
    late_id = await stage.admit()
    await waiting
    assert (await stage.ended(job_id)).status == "done"
    assert await stage.text(job_id) == oracle_text("hello", 20)
    assert await stage.state(late_id) == "waiting"


@pytest.mark.parametrize("n", [1, 3])
async def test_a_drain_hands_back_what_it_cannot_finish_and_another_goes_on(make_stage: MakeStage, n: int) -> None:
    stage = await make_stage(drain_s=0.05)
    former = await stage.replica(scripted(tokens_per_s=200))
    job_id = await stage.admit(max_tokens=100, n=n)

    async def is_under_way() -> bool:
        return len(await stage.text(job_id, n - 1)) > 90

    await eventually(is_under_way)
    await former.drain()
    assert await stage.state(job_id) == "waiting"
    assert 90 < len(await stage.text(job_id)) < 900
    await stage.replica(scripted(tokens_per_s=1000))
    ended = await stage.ended(job_id)
    assert ended.usage is not None
    assert (ended.status, ended.usage.completion_tokens) == ("done", 100 * n)
    for choice in range(n):
        assert await stage.text(job_id, choice) == oracle_text("hello", 100, choice=choice)
    status = await stage.plain.status(job_id)
    assert status is not None
    assert (status.attempt, status.deaths) == (2, 0)


async def test_a_claim_that_is_under_way_when_the_drain_begins_is_handed_back(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.05)
    replica = await stage.replica()
    held = stage.faults.held["claim"] = asyncio.Event()
    await stage.admit()  # wakes it, or it asks by itself
    job_id = await stage.admit()

    async def is_claimed() -> bool:
        return await stage.state(job_id) == "running"

    await eventually(is_claimed)
    draining = asyncio.create_task(replica.drain())
    await eventually(lambda: replica.worker._is_draining)
    held.set()
    async with asyncio.timeout(2):
        await draining
    assert await stage.state(job_id) == "waiting"


async def test_a_drain_ends_also_when_the_broker_is_away(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.05, lease_s=0.3)
    replica = await stage.replica()
    for index in range(3):
        await stage.admit()
        (await replica.run(index)).say("a")
    (await replica.run(2)).say("b", end="eos")
    stage.faults.down |= {"exchange", "last_id", "release", "tick", "claim", "present", "absent"}
    (await replica.run(1)).say("c")
    async with asyncio.timeout(3):
        await replica.drain()
    assert replica.hand.is_closed
    assert replica.hand.runs[0].is_cancelled


async def test_what_ends_while_it_is_handed_back_is_settled(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.05)
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    stage.faults.gate.clear()
    run.say("a", end="eos")
    draining = asyncio.create_task(replica.drain())
    await eventually(lambda: stage.faults.sent and draining.done() is False and replica.worker._is_draining)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(draining), 0.2)
    stage.faults.gate.set()
    await draining
    assert (await stage.ended(job_id)).status == "done"


async def test_a_replica_that_drains_says_so_and_then_leaves(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=5.0, lease_s=0.6)
    replica = await stage.replica()
    [about] = (await stage.plain.listing("replicas")).values()
    assert (about["state"], about["slots"], about["model"]) == ("ready", "4", "m")
    await stage.admit()
    run = await replica.run()
    draining = asyncio.create_task(replica.drain())

    async def is_draining() -> bool:
        return [each["state"] for each in (await stage.plain.listing("replicas")).values()] == ["draining"]

    await eventually(is_draining)
    run.say("a", end="eos")
    await draining
    assert await stage.plain.listing("replicas") == {}
    assert replica.hand.is_closed


# -- leases and replies that are lost ---------------------------------------------------------------------------------


async def test_a_lost_lease_stops_the_engine_and_writes_nothing(make_stage: MakeStage) -> None:
    stage = await make_stage(lease_s=0.4)
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    run.say("a")
    await eventually(lambda: stage.faults.calls.count("exchange") == 1)
    stage.faults.down |= {"tick", "claim", "reap", "present"}  # it cannot renew

    async def is_taken_back() -> bool:
        await stage.plain.present("cluster", "test", "m", {})
        return (await stage.plain.reap(0)).leases == 1

    await eventually(is_taken_back)
    [claim] = await stage.plain.claim(0, "other", "m", 1)
    stage.faults.down.clear()
    async with asyncio.timeout(WITHIN_S):
        await run.cancelled.wait()
    run.say("b")
    await eventually(lambda: replica.worker.running == 0)
    assert claim.attempt == 2
    assert [entry.id for entry in await stage.log(job_id)][-1] == "2-0"
    assert await stage.text(job_id) == "a"


@pytest.mark.parametrize("fault", ["after", "before"])
async def test_a_lost_claim_reply_is_mended(make_stage: MakeStage, fault: str) -> None:
    stage = await make_stage(lease_s=0.6)
    stage.faults.down.add("claim")
    replica = await stage.replica()
    await eventually(lambda: "claim" in stage.faults.calls)
    job_id = await stage.admit()
    stage.faults.fail("claim", fault)  # type: ignore[arg-type]
    stage.faults.down.clear()
    run = await replica.run()
    run.say("a", end="eos")
    ended = await stage.ended(job_id)
    status = await stage.plain.status(job_id)
    assert status is not None
    assert (ended.status, status.deaths) == ("done", 0)
    assert status.attempt == (2 if fault == "after" else 1)


async def test_a_job_whose_log_cannot_be_read_now_is_handed_back(stage: Stage) -> None:
    former = await stage.replica()
    job_id = await stage.admit()
    (await former.run()).say("a")
    await eventually(lambda: stage.faults.calls.count("exchange") == 1)
    await former.worker.release_all()
    stage.faults.fail("read", "before")
    run = await former.run(1)
    assert run.generation.generated == [0]
    run.say("b", end="eos")
    assert (await stage.ended(job_id)).status == "done"
    assert await stage.text(job_id) == "ab"


async def test_ticks_that_fail_do_no_harm(make_stage: MakeStage) -> None:
    stage = await make_stage(lease_s=0.6)
    faults: list[Fault] = ["before", "none", "after"]
    stage.faults.fail("tick", *(faults * 10))
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    await eventually(lambda: not stage.faults.plan["tick"])
    await stage.plain.cancel(job_id, "test")
    async with asyncio.timeout(WITHIN_S):
        await run.cancelled.wait()
    replica.worker.check_health()


async def test_leases_are_not_reaped_right_after_the_broker_was_away(make_stage: MakeStage) -> None:
    stage = await make_stage(lease_s=1.6)  # longer than the time from one reap to the next
    await stage.replica()
    stage.faults.fail("reap", "before")
    loop, reaps = asyncio.get_running_loop(), stage.faults.calls.count
    await eventually(lambda: reaps("reap") == 1)
    failed_at = loop.time()
    await eventually(lambda: reaps("reap") == 2)
    assert loop.time() - failed_at > 1.5


# -- health -----------------------------------------------------------------------------------------------------------


async def test_an_engine_without_a_step_fails_the_health_check_and_ends_its_replica(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.3, lease_s=0.6)
    replica = await stage.replica()
    await stage.admit()
    await replica.run()
    replica.worker.check_health()
    with pytest.raises(EngineFailed, match="no step"):
        await asyncio.wait_for(replica.task, 3)
    with pytest.raises(EngineFailed, match="no step"):
        replica.worker.check_health()
    assert replica.hand.is_closed
    assert await stage.plain.listing("replicas") == {}


async def test_an_engine_that_makes_steps_now_and_then_is_well(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.2)
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    for _ in range(6):
        await asyncio.sleep(0.1)
        run.say("a")
    run.say("b", end="eos")
    assert (await stage.ended(job_id)).status == "done"
    replica.worker.check_health()


async def test_a_prompt_that_hangs_the_tokenizer_is_a_death_and_holds_nothing(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.2, max_deaths=1)
    replica = await stage.replica()
    replica.hand.encoding.clear()
    job_id = await stage.admit()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(replica.task, 3)
    assert replica.worker.running == 0
    letter = await stage.plain.dead_letter(job_id)
    assert letter is not None
    assert (letter.died_of, letter.died_with) == ("engine_hung", replica.worker.id)


async def test_an_engine_that_hangs_also_when_it_is_closed_does_not_hold_its_replica(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.workers.worker._CLOSE_S", 0.1)

    class HungEngine(HandEngine):
        async def close(self) -> None:
            await asyncio.Event().wait()

    stage = await make_stage(step_timeout_s=0.2)
    replica = await stage.replica(HungEngine())
    await stage.admit()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(replica.task, 3)


async def test_a_job_on_which_the_engine_hung_is_handed_back_with_a_death(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.2, max_deaths=2)
    hung, well = await stage.admit("hung"), await stage.admit("well")
    for deaths in (1, 2):
        replica = await stage.replica()
        await replica.run(1)
        [steady] = [run for run in replica.hand.runs if run.generation.prompt == (await _job(stage, well)).prompt]
        while not replica.task.done():
            steady.say("a")
            await asyncio.wait([replica.task], timeout=0.02)
        with pytest.raises(EngineFailed):
            await replica.task
        status = await stage.plain.status(hung)
        assert status is not None
        assert status.deaths == deaths
    ended = await stage.ended(hung)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "too_many_deaths")
    healthy = await stage.plain.status(well)
    assert healthy is not None
    assert (healthy.state, healthy.deaths) == ("waiting", 0)
    assert [letter.job.id for letter in await stage.plain.dead_letters(0, 9)] == [hung]


async def test_three_rolling_updates_are_no_deaths(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.0, max_deaths=1)
    job_id = await stage.admit(max_tokens=4)
    for _ in range(3):
        replica = await stage.replica()
        (await replica.run()).say("a")
        await replica.drain()
    status = await stage.plain.status(job_id)
    assert status is not None
    assert (status.state, status.attempt, status.deaths) == ("waiting", 3, 0)


async def test_a_job_that_only_waits_for_the_broker_is_no_sign_of_a_hung_engine(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.1)
    replica = await stage.replica()
    await stage.admit()
    run = await replica.run()
    stage.faults.down |= {"exchange", "last_id"}
    run.say("a", end="eos")
    until = asyncio.get_running_loop().time() + 0.3
    await eventually(lambda: asyncio.get_running_loop().time() > until)
    replica.worker.check_health()


async def test_a_loop_that_broke_fails_the_health_check(stage: Stage) -> None:
    replica = await stage.replica()
    replica.worker.check_health()
    stage.faults.broken.add("tick")

    def is_unwell() -> bool:
        with contextlib.suppress(EngineFailed):
            replica.worker.check_health()
            return False
        return True

    await eventually(is_unwell)


async def test_a_broken_claim_loop_ends_the_replica(stage: Stage) -> None:
    stage.faults.broken.add("claim")
    replica = await stage.replica()
    with pytest.raises(RuntimeError):
        await replica.task
    assert await stage.plain.listing("replicas") == {}
    assert replica.hand.is_closed


async def test_a_replica_that_becomes_ready_while_the_broker_is_away_goes_on(stage: Stage) -> None:
    stage.faults.down |= {"present", "claim"}
    replica = await stage.replica()
    stage.faults.down.clear()
    job_id = await stage.admit()
    (await replica.run()).say("a", end="eos")
    assert (await stage.ended(job_id)).status == "done"


async def test_a_replica_that_cannot_load_is_not_there(stage: Stage) -> None:
    engine = HandEngine()
    engine.load_error = EngineFailed("no such file")
    with pytest.raises(EngineFailed):
        await stage.replica(engine)
    assert await stage.plain.listing("replicas") == {}
    assert engine.is_closed
