"""A replica that drains, or loses a lease or a reply: nothing is lost, and another goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.broker.models import ScriptedModel
from headrace.workers.engines.scripted import ScriptedEngine
from tests.faults import Fault
from tests.support import eventually
from tests.workers.replicas import MakeStage, Stage, oracle_text

WITHIN_S = 0.6
"""Three times what the design allows from a mark to the engine's cancel."""


def scripted(tokens_per_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=tokens_per_s))


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
    stage.faults.down |= {"exchange", "last_ids", "release", "tick", "claim", "present", "absent"}
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
async def test_a_lost_claim_reply_is_mended(make_stage: MakeStage, fault: Fault) -> None:
    stage = await make_stage(lease_s=0.6)
    stage.faults.down.add("claim")
    replica = await stage.replica()
    await eventually(lambda: "claim" in stage.faults.calls)
    job_id = await stage.admit()
    stage.faults.fail("claim", fault)
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
    some: list[Fault] = ["before", "none", "after"]
    stage.faults.fail("tick", *some * 10)
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    await eventually(lambda: not stage.faults.plan["tick"])
    await stage.plain.cancel(job_id, "test")
    async with asyncio.timeout(WITHIN_S):
        await run.cancelled.wait()
    replica.worker.check_health()
