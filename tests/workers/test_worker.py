"""A replica: it claims, runs and settles; it hears cancels in time; and whatever breaks, no job and no slot is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from headrace.broker import metrics
from headrace.broker.errors import EngineDied, EngineFailed
from headrace.broker.messages import Text
from headrace.broker.models import ScriptedModel, ScriptedPart
from headrace.workers.engines.scripted import ScriptedEngine
from tests.support import eventually
from tests.workers.replicas import HandEngine, MakeStage, Stage, oracle_text

WITHIN_S = 0.6
"""Three times what the design allows from a mark to the engine's cancel."""


def scripted(tokens_per_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=tokens_per_s))


# -- claim, run, settle -----------------------------------------------------------------------------------------------


async def test_jobs_run_to_their_end(stage: Stage) -> None:
    replica = await stage.replica(scripted())
    job_ids = [await stage.admit(f"job {i}", max_tokens=20) for i in range(10)]
    for i, job_id in enumerate(job_ids):
        ended = await stage.ended(job_id)
        assert (ended.status, ended.error) == ("done", None)
        assert await stage.text(job_id) == oracle_text(f"job {i}", 20)
    await eventually(lambda: replica.worker.running == 0)


async def test_a_lone_job_costs_one_claim(stage: Stage) -> None:
    await stage.replica(scripted())
    for i in range(11):
        job_id = await stage.admit(max_tokens=2)
        assert (await stage.ended(job_id)).status == "done"
        if i == 0:  # what a replica asks when it begins is over
            stage.faults.calls.clear()
    assert stage.faults.calls.count("claim") < 15, "an idle one asks by itself now and then"


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
    assert [run.generation.job.prompt for run in replica.hand.runs] == [Text("A"), Text("C")]


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


async def test_the_registry_says_what_a_replica_can_and_its_model_is(stage: Stage) -> None:
    model = ScriptedModel(name="m", script=[ScriptedPart(reasoning="Hm")], dimensions=8, context_tokens=500)
    await stage.replica(ScriptedEngine(model))
    [row] = (await stage.plain.listing("replicas")).values()
    assert {
        "model": "m",
        "state": "ready",
        "tools": "1",
        "constraints": "json",
        "reasoning": "1",
    }.items() <= row.items()
    assert {"embeddings": "8", "fim": "1", "context_tokens": "500"}.items() <= row.items()
    assert json.loads(row["details"]) == {"format": "scripted", "family": "scripted", "context_tokens": 500}


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
        [steady] = [run for run in replica.hand.runs if run.generation.job.prompt == Text("well")]
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


@pytest.mark.parametrize(("error", "deaths"), [(EngineDied("dead"), 1), (EngineFailed("away"), 0)])
async def test_an_engine_that_died_hands_its_jobs_back_and_fails_none(
    make_stage: MakeStage, error: EngineFailed, deaths: int
) -> None:
    stage = await make_stage(step_timeout_s=0.4)
    jobs = [await stage.admit(), await stage.admit()]
    replica = await stage.replica()
    (await replica.run(1)).say("a")
    replica.hand.health_error = error
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(replica.task, 3)
    for job_id in jobs:
        status = await stage.plain.status(job_id)
        assert status is not None
        assert (status.state, status.deaths) == ("waiting", deaths)
    successor = await stage.replica()
    for index in range(2):
        (await successor.run(index)).say("b", end="eos")
    for job_id in jobs:
        await stage.ended(job_id)
    assert sorted([await stage.text(job_id) for job_id in jobs]) == ["ab", "b"]


async def test_a_start_is_measured_by_phase(make_stage: MakeStage) -> None:
    def measured() -> set[str]:
        return {
            sample.labels["phase"]
            for family in metrics.STARTUP_SECONDS.collect()
            for sample in family.samples
            if sample.labels["model"] == "m"
        }

    metrics.STARTUP_SECONDS.clear()
    stage = await make_stage()
    engine = HandEngine()
    engine.load_error = EngineFailed("no weights")
    with pytest.raises(EngineFailed):
        await stage.replica(engine)
    assert measured() == {"starting"}
    await stage.replica()
    assert measured() == {"starting", "loading", "total"}


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
    stage.faults.down |= {"exchange", "last_ids"}
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
