"""Replicas and prefixes: the turns of a conversation go where its cache is, and what was cached is told and counted."""

from __future__ import annotations

from headrace.broker import keys, metrics, prefixes
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.workers.engines.scripted import ScriptedEngine
from tests.support import eventually
from tests.workers.replicas import HandEngine, Replica, Stage


def remembering(cache_tokens: int = 100_000) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=0, cache_tokens=cache_tokens))


async def ask(stage: Stage, text: str) -> str:
    """A job in the queue, as a pod admits it."""
    await stage.plain.present("cluster", "test", "m", {})
    job = Job(keys.new_job_id(1), "m", Text(text), max_tokens=4)
    await stage.plain.admit(Admission(job, View("alice", "m", "openai.chat"), prefix=prefixes.anchors(job)))
    return job.id


async def asked_and_cached(stage: Stage, text: str) -> tuple[int, int]:
    """The usage of a prompt: its tokens, and those that were cached."""
    usage = (await stage.ended(await ask(stage, text))).usage
    assert usage is not None
    return usage.prompt_tokens, usage.cached_tokens


async def test_the_turns_of_a_conversation_go_where_its_cache_is(stage: Stage) -> None:
    for _ in range(3):
        await stage.replica(remembering())
    texts = dict.fromkeys("abcd", "")
    for turn in range(5):
        for name in texts:
            texts[name] += name * 4000
            prompt, cached = await asked_and_cached(stage, texts[name])
            assert prompt == 1000 * (turn + 1)
            assert cached == 16 * (1000 * turn // 16)


async def test_what_was_cached_is_in_the_usage_and_counted(stage: Stage) -> None:
    counter = metrics.TOKENS.labels("m", "cached")
    await stage.replica(remembering())
    before = counter._value.get()
    await asked_and_cached(stage, "a" * 8000)
    assert (await asked_and_cached(stage, "a" * 8000 + "b"))[1] == 2000
    await eventually(lambda: counter._value.get() == before + 2000)


async def test_what_a_cache_has_lost_is_told_with_the_next_claim(stage: Stage) -> None:
    await stage.replica(remembering(cache_tokens=4000))
    for name in "abcde":
        await asked_and_cached(stage, name * 8000)
    first = prefixes.split(prefixes.anchors(Job("0" * 32, "m", Text("a" * 8000))))
    holders = stage.plain._shards[0]._holders["m"]  # type: ignore[attr-defined]
    assert all(anchor not in holders._of for anchor in first)
    assert len(holders) > 0


async def test_a_job_that_is_left_to_a_busy_replica_is_taken_by_another_in_the_end(stage: Stage) -> None:
    """The one that holds its prefix has no slot, and does not get one."""
    holder = await stage.replica(HandEngine())
    await ask(stage, "a" * 8000)
    await holder.run()
    for number in range(3):
        await ask(stage, f"{number}")
    await holder.run(3)
    other: Replica = await stage.replica(HandEngine())
    pace = other.worker._seats.pace
    pace.prefills("before")
    pace._busy_s, pace._prefilled = 1.0, 5000.0  # it is slow, so the job is left to the other for a third of a second
    held = await ask(stage, "a" * 8000 + "b")
    run = await other.run()
    assert run.generation.job.id == held
