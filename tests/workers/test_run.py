"""One job on a replica: how it ends, what it says of failures, and that a seam between replicas does not show."""

from __future__ import annotations

import asyncio
import itertools
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.errors import EngineFailed
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Ended, Finished, Started, Usage
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import QueueSettings
from headrace.broker.writer import LogWriter
from headrace.workers.engines.protocol import Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.run import JobRun
from tests import jumping
from tests.support import eventually
from tests.workers.replicas import HandEngine, Replica, Stage, oracle_text, token_of


@pytest.fixture
async def replica(stage: Stage) -> Replica:
    return await stage.replica()


async def hand_over(stage: Stage, replica: Replica) -> None:
    """Have the replica hand its jobs back; it may take them again at once."""
    await replica.worker.release_all()


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "reason"), [("eos", "stop"), ("limit", "length")])
async def test_a_job_ends_as_its_engine_says(stage: Stage, replica: Replica, end: str, reason: str) -> None:
    job_id = await stage.admit()
    run = await replica.run()
    run.say("a", "b")
    run.say("c", end=end)
    ended = await stage.ended(job_id)
    assert (ended.status, ended.error, ended.usage) == ("done", None, Usage(5, 3))
    assert await stage.finishes(job_id) == [Finished(0, reason)]  # type: ignore[arg-type]
    assert await stage.starts(job_id) == [Started(5)]
    assert await stage.text(job_id) == "abc"


async def test_an_end_without_tokens(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit()
    (await replica.run()).say(end="eos")
    assert (await stage.ended(job_id)).usage == Usage(5, 0)
    assert await stage.text(job_id) == ""


async def test_the_first_entry_says_that_the_engine_has_begun_before_any_token(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit()
    await replica.run()

    async def has_started() -> bool:
        return await stage.starts(job_id) == [Started(5)]

    await eventually(has_started)


async def test_b2_a_stop_string_ends_the_engine_and_is_not_said(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(stop=["STOP"])
    run = await replica.run()
    for piece in ("foo", "ST", "OPbar"):
        assert not run.is_cancelled
        run.say(piece)
    assert run.is_cancelled
    run.say("more")
    assert (await stage.ended(job_id)).status == "done"
    assert await stage.text(job_id) == "foo"
    assert await stage.finishes(job_id) == [Finished(0, "stop", "STOP")]


async def test_h12_choices_end_each_for_itself(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(n=2, stop=["c"])
    one, two = await replica.run(0), await replica.run(1)
    assert [run.generation.choice for run in (one, two)] == [0, 1]
    for piece in ("a", "b", "c"):
        one.say(piece)
    two.say("x", "y", "z", end="eos")
    ended = await stage.ended(job_id)
    assert ended.usage == Usage(5, 6)
    assert (await stage.text(job_id, 0), await stage.text(job_id, 1)) == ("ab", "xyz")
    assert await stage.finishes(job_id) == [Finished(0, "stop", "c"), Finished(1, "stop")]


async def test_h12_a_cancel_ends_all_choices(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(n=3)
    runs = [await replica.run(index) for index in range(3)]
    runs[0].say("a", end="eos")
    await stage.plain.cancel(job_id, "test")
    assert (await stage.ended(job_id)).status == "cancelled"
    assert [run.is_cancelled for run in runs] == [True] * 3


# -- failures ---------------------------------------------------------------------------------------------------------


async def test_a8_an_engine_that_fails_says_nothing_of_its_inside(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(n=2)
    one, two = await replica.run(0), await replica.run(1)
    one.say("a")
    one.fail(RuntimeError("boom at /srv/app/x.py"))
    two.fail(RuntimeError("again"))
    ended = await stage.ended(job_id)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "engine_error")
    assert ended.error.message == EngineFailed().message
    assert two.is_cancelled
    assert await stage.text(job_id) == "a"
    await eventually(lambda: replica.worker.running == 0)


async def test_a_prompt_that_the_engine_refuses_is_the_callers_error(stage: Stage, replica: Replica) -> None:
    ended = await stage.ended(await stage.admit("bad"))
    assert ended.error is not None
    assert ended.status == "failed"
    assert (ended.error.code, ended.error.message, ended.error.param) == (
        "invalid_request",
        "this prompt is bad",
        "prompt",
    )
    await eventually(lambda: replica.worker.running == 0)
    assert replica.hand.runs == []


async def test_a_bug_in_the_engine_ends_the_job_and_not_the_replica(stage: Stage, replica: Replica) -> None:
    ended = await stage.ended(await stage.admit("bug"))
    assert ended.error is not None
    assert (ended.error.code, ended.error.message) == ("engine_error", EngineFailed().message)
    job_id = await stage.admit()
    (await replica.run()).say("a", end="eos")
    assert (await stage.ended(job_id)).status == "done"
    replica.worker.check_health()


# -- seams ------------------------------------------------------------------------------------------------------------


async def test_another_replica_goes_on_after_the_last_token(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(max_tokens=5)
    first = await replica.run(0)
    first.say("a", "b")
    await hand_over(stage, replica)
    assert first.is_cancelled
    second = await replica.run(1)
    assert second.generation.generated == [token_of("a").id, token_of("b").id]
    assert second.generation.max_tokens == 3
    second.say("c", end="limit")
    assert (await stage.ended(job_id)).usage == Usage(5, 3)
    assert await stage.text(job_id) == "abc"


async def test_b1_half_a_character_goes_over_the_seam(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit()
    (await replica.run(0)).say(b"\xf0\x9f")
    await hand_over(stage, replica)
    (await replica.run(1)).say(b"\x98")
    await hand_over(stage, replica)
    (await replica.run(2)).say(b"\x80", " ok", end="eos")
    await stage.ended(job_id)
    assert await stage.text(job_id) == "😀 ok"


async def test_b2_half_a_stop_string_goes_over_the_seam(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(stop=["STOP"])
    (await replica.run(0)).say("fooST")
    await hand_over(stage, replica)
    run = await replica.run(1)
    run.say("OPbar")
    assert run.is_cancelled
    await stage.ended(job_id)
    assert await stage.text(job_id) == "foo"
    assert await stage.finishes(job_id) == [Finished(0, "stop", "STOP")]


async def test_a_choice_that_is_finished_is_not_made_again(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(n=2)
    (await replica.run(0)).say("a", end="eos")
    (await replica.run(1)).say("x")
    await hand_over(stage, replica)
    third = await replica.run(2)
    assert third.generation.choice == 1
    third.say("y", end="eos")
    await stage.ended(job_id)
    assert (await stage.text(job_id, 0), await stage.text(job_id, 1)) == ("a", "xy")
    assert [finished.choice for finished in await stage.finishes(job_id)] == [0, 1]
    assert len(replica.hand.runs) == 3


async def test_a_job_that_was_finished_but_not_settled_is_only_settled(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit()
    run = await replica.run(0)
    await eventually(lambda: len(stage.faults.sent) == 1)
    stage.faults.fail("exchange", "after")  # the last entry is written, and then nothing for a while
    stage.faults.down.add("last_ids")
    run.say("a", end="eos")
    await eventually(lambda: "last_ids" in stage.faults.calls)
    await stage.plain.release(replica.worker.id, job_id, None, None)
    other = await stage.replica(is_faulty=False)
    ended = await stage.ended(job_id)
    assert (ended.status, ended.usage) == ("done", Usage(5, 1))
    assert other.hand.runs == []
    stage.faults.down.clear()
    await eventually(lambda: replica.worker.running == 0)


async def test_a_long_log_is_taken_up_whole(stage: Stage, replica: Replica) -> None:
    job_id = await stage.admit(max_tokens=2000)
    run = await replica.run(0)
    for _ in range(1100):
        run.say("a")
        await asyncio.sleep(0)
    await hand_over(stage, replica)
    assert len((await replica.run(1)).generation.generated) == 1100
    assert len(await stage.log(job_id)) > 1024


@pytest.mark.parametrize("tokens_per_s", [0.0, 300.0])
async def test_many_seams_do_not_show(stage: Stage, tokens_per_s: float) -> None:
    engine = ScriptedEngine(ScriptedModel(name="m", tokens_per_s=tokens_per_s))
    replica = await stage.replica(engine)
    jobs = {await stage.admit(f"text {i}", max_tokens=150): f"text {i}" for i in range(4)}
    for job_id, text in jobs.items():
        while await stage.state(job_id) in ("waiting", "running"):
            length = len(await stage.text(job_id))

            async def has_moved(job_id: str = job_id, length: int = length) -> bool:
                return len(await stage.text(job_id)) > length + 50 or await stage.state(job_id) == "done"

            await eventually(has_moved)
            await hand_over(stage, replica)
        assert await stage.text(job_id) == oracle_text(text, 150)


Seam = Literal["release", "crash"]


async def play(pieces: list[bytes], stops: list[str], cuts: list[tuple[int, Seam]], end: str) -> tuple[object, ...]:
    """Run a job whose engine makes these pieces, over as many replicas as there are cuts; what its log says then."""
    broker = MemoryBroker(QueueSettings())
    stage = Stage(broker, queue=QueueSettings())
    # an engine that ends by itself after the last token that it may make has made one more, which is the end
    job_id = await stage.admit(stop=stops, max_tokens=len(pieces) + (end == "eos"))
    writer = LogWriter(broker, 0)
    writing = asyncio.create_task(writer.run())
    plan = [*sorted(cuts), (len(pieces), None)]
    for until, seam in plan:
        claims = await broker.claim(0, "r", "m", 1)
        if not claims:
            break
        engine = HandEngine()
        run = JobRun(claims[0], engine, writer)
        await run.start(broker)
        for hand in engine.runs:
            for index in range(len(hand.generation.generated), until):
                hand.emit(Step([token_of(pieces[index])]))
                await asyncio.sleep(0)
            if seam is None:
                hand.emit(Step([], end=end))  # type: ignore[arg-type]
        if run.is_ending:
            await run.done.wait()
        elif seam == "release":
            await run.release(broker, "r")
        else:
            await broker.release("r", job_id, None, None)
            run.track.lose("stale")
    ended: Ended = await stage.ended(job_id)
    writing.cancel()
    return ended.status, ended.usage, await stage.finishes(job_id), await stage.text(job_id)


@st.composite
def texts_in_pieces(draw: st.DrawFn) -> list[bytes]:
    data = draw(st.text("abXY😀é", max_size=20)).encode()
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=12))
    return [data[a:b] for a, b in itertools.pairwise([0, *sorted(set(cuts)), len(data)])]


@given(
    pieces=texts_in_pieces(),
    stops=st.lists(st.sampled_from(["X", "XY", "bX", "😀a", "éé"]), max_size=2),
    cuts=st.lists(st.tuples(st.integers(0, 13), st.sampled_from(["release", "crash"])), max_size=4),
    end=st.sampled_from(["eos", "limit"]),
)
@settings(deadline=None)
def test_a_job_cut_anywhere_says_what_it_would_have_said_uncut(
    pieces: list[bytes], stops: list[str], cuts: list[tuple[int, Seam]], end: str
) -> None:
    cuts = [(min(at, len(pieces)), seam) for at, seam in cuts]
    whole = jumping.run(play(pieces, stops, [], end))
    assert jumping.run(play(pieces, stops, cuts, end)) == whole
