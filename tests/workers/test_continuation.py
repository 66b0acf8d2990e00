"""What a successor does with a log that was cut anywhere: engine, log, usage and metric all agree."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, get_args

import pytest
from prometheus_client import REGISTRY

from headrace.broker import messages
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Claimed, Delta, Ended, Event, Finished, Started, Text, Usage
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Append
from headrace.broker.settings import QueueSettings
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine, oracle
from tests.workers.replicas import HandEngine, Replica, Stage, oracle_text, token_of

Outcome = Literal["continued", "restarted", "finished", "not_continuable", "failed"]


class Recording(ScriptedEngine):
    """The scripted engine, and what it was told."""

    def __init__(self, **model: Any) -> None:
        super().__init__(ScriptedModel(**{"name": "m", "tokens_per_s": 0.0, **model}))
        self.told: list[Generation] = []

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        self.told.append(generation)
        return super().start(generation, emit, fail)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    queue = QueueSettings()
    stage = Stage(MemoryBroker(queue), queue=queue)
    yield stage
    await stage.close()


async def cut(stage: Stage, *entries: list[Event], text: str = "hello", **fields: Any) -> str:
    """A job whose worker was killed after it had logged these entries; it waits again."""
    job_id = await stage.admit(text, **fields)
    [claim] = await stage.plain.claim(0, "former", "m", 1)
    assert claim.job.id == job_id
    lane = stage.plain.lane(0)
    for n, events in enumerate(entries, 1):
        data = messages.encode(messages.Entry(n, events))
        assert (await lane.exchange([], [Append(job_id, f"1-{n}", data)], [])).appends == ["ok"]
    await stage.plain.release("former", job_id, None, None)
    return job_id


def tokens(text: str, start: int, stop: int, choice: int = 0) -> Delta:
    """What the scripted engine would have logged of these tokens."""
    ids = [oracle(text, 0, choice, index) for index in range(start, stop)]
    return Delta(choice, "".join(f" {token_id:08x}" for token_id in ids), ids)


def failovers() -> dict[str, float]:
    outcomes = get_args(Outcome)
    name = "headrace_failovers_total"
    return {each: REGISTRY.get_sample_value(name, {"outcome": each}) or 0.0 for each in outcomes}


async def go_on(stage: Stage, job_id: str, engine: Recording, outcome: Outcome) -> Ended:
    """Have a successor take the job up; its end, after a check of what the metric said."""
    before = failovers()
    await stage.replica(engine)
    ended = await stage.ended(job_id)
    assert {each: count - before[each] for each, count in failovers().items() if count != before[each]} == {outcome: 1}
    return ended


async def test_e2_the_engine_is_given_the_prompt_and_the_tokens_so_far_and_fewer_tokens(stage: Stage) -> None:
    job_id = await cut(stage, [Started(2)], [tokens("hello", 0, 3)], [tokens("hello", 3, 4)], max_tokens=10)
    ended = await go_on(stage, job_id, engine := Recording(), "continued")
    [told] = engine.told
    assert (told.job.prompt, told.prompt_ids) == (Text("hello"), [0, 0])
    assert told.generated == [oracle("hello", 0, 0, index) for index in range(4)]
    assert (told.max_tokens, told.choice) == (6, 0)
    assert (ended.status, ended.usage) == ("done", Usage(2, 10))
    assert await stage.text(job_id) == oracle_text("hello", 10)
    assert await stage.finishes(job_id) == [Finished(0, "length")]


async def test_e2_a_job_without_a_limit_is_given_none(stage: Stage) -> None:
    job_id = await cut(stage, [Started(2)], [tokens("hello", 0, 60)])
    ended = await go_on(stage, job_id, engine := Recording(), "continued")
    assert [(len(told.generated), told.max_tokens) for told in engine.told] == [(60, None)]
    assert (ended.usage, await stage.text(job_id)) == (Usage(2, 64), oracle_text("hello", 64))
    assert await stage.finishes(job_id) == [Finished(0, "stop")]


@pytest.mark.parametrize("entries", [(), ([Started(2)],)], ids=["before Started", "after Started"])
async def test_e2_killed_before_the_first_token_it_begins_anew(stage: Stage, entries: tuple[list[Event], ...]) -> None:
    job_id = await cut(stage, *entries, max_tokens=5)
    ended = await go_on(stage, job_id, engine := Recording(), "restarted")
    assert [(told.generated, told.max_tokens) for told in engine.told] == [([], 5)]
    assert (ended.usage, await stage.text(job_id)) == (Usage(2, 5), oracle_text("hello", 5))


async def test_e2_killed_after_the_last_token_no_token_is_made(stage: Stage) -> None:
    job_id = await cut(stage, [Started(2)], [tokens("hello", 0, 10)], max_tokens=10)
    ended = await go_on(stage, job_id, engine := Recording(), "continued")
    assert engine.told == []
    assert (ended.status, ended.usage) == ("done", Usage(2, 10))
    assert await stage.text(job_id) == oracle_text("hello", 10)
    assert await stage.finishes(job_id) == [Finished(0, "length")]


async def test_e2_text_that_was_held_back_with_the_last_token_is_said(stage: Stage) -> None:
    delta = tokens("hello", 0, 2)
    held = Delta(0, delta.text[:-2], delta.token_ids)
    job_id = await cut(stage, [Started(2)], [held], max_tokens=2, stop=[delta.text[-2:] + "!"])
    await go_on(stage, job_id, Recording(), "continued")
    assert await stage.text(job_id) == oracle_text("hello", 2)
    assert await stage.finishes(job_id) == [Finished(0, "length")]


async def test_e2_killed_after_the_finish_only_the_end_is_missing(stage: Stage) -> None:
    job_id = await cut(stage, [Started(7)], [tokens("hello", 0, 4), Finished(0, "length")], max_tokens=4)
    ended = await go_on(stage, job_id, engine := Recording(), "finished")
    assert engine.told == []
    assert (ended.status, ended.usage) == ("done", Usage(7, 4))
    *_, claimed, end = await stage.log(job_id)
    assert [type(event) for event in claimed.events + end.events] == [Claimed, Ended]
    assert (claimed.id, end.id) == ("2-0", "2-1")
    assert await stage.finishes(job_id) == [Finished(0, "length")]


async def test_e2_two_choices_go_on_each_where_it_was(stage: Stage) -> None:
    entries: list[list[Event]] = [[Started(2)], [tokens("hello", 0, 3), tokens("hello", 0, 1, 1)]]
    job_id = await cut(stage, *entries, [tokens("hello", 1, 5, 1)], n=2, max_tokens=8)
    ended = await go_on(stage, job_id, engine := Recording(), "continued")
    told = {each.choice: (len(each.generated), each.max_tokens) for each in engine.told}
    assert told == {0: (3, 5), 1: (5, 3)}
    assert ended.usage == Usage(2, 16)
    for choice in (0, 1):
        assert await stage.text(job_id, choice) == oracle_text("hello", 8, choice=choice)
    assert sorted(each.choice for each in await stage.finishes(job_id)) == [0, 1]


async def test_e2_killed_after_the_finish_of_one_of_two_choices(stage: Stage) -> None:
    entries: list[list[Event]] = [
        [Started(2)],
        [tokens("hello", 0, 8), Finished(0, "length"), tokens("hello", 0, 2, 1)],
    ]
    job_id = await cut(stage, *entries, n=2, max_tokens=8)
    ended = await go_on(stage, job_id, engine := Recording(), "continued")
    assert [(each.choice, len(each.generated), each.max_tokens) for each in engine.told] == [(1, 2, 6)]
    assert ended.usage == Usage(2, 16)
    for choice in (0, 1):
        assert await stage.text(job_id, choice) == oracle_text("hello", 8, choice=choice)
    assert await stage.finishes(job_id) == [Finished(0, "length"), Finished(1, "length")]


async def test_e2_a_stop_string_over_the_seam_is_found_and_not_said(stage: Stage) -> None:
    whole = oracle_text("hello", 10)
    stop = whole[25:29]  # it begins in the third token and ends in the fourth
    job_id = await cut(stage, [Started(2)], [Delta(0, whole[:25], tokens("hello", 0, 3).token_ids)], stop=[stop])
    ended = await go_on(stage, job_id, Recording(tokens_per_s=1000.0), "continued")
    assert await stage.text(job_id) == whole[:25]
    assert await stage.finishes(job_id) == [Finished(0, "stop", stop)]
    assert ended.usage == Usage(2, 4)


async def test_e2_half_a_character_over_the_seam_is_whole(stage: Stage) -> None:
    script: list[str | list[int]] = ["a", [0xF0, 0x9F], [0x98], [0x80], "b"]
    job_id = await cut(stage, [Started(2)], [Delta(0, "a", [0]), Delta(0, "", [1])])
    ended = await go_on(stage, job_id, Recording(script=script), "continued")
    assert (ended.usage, await stage.text(job_id)) == (Usage(2, 5), "a\N{GRINNING FACE}b")


async def test_e2_log_probabilities_are_one_for_each_token_over_the_seam(stage: Stage) -> None:
    undisturbed = await stage.admit(max_tokens=6, logprobs=2)
    former = await stage.replica(Recording())
    await stage.ended(undisturbed)
    await former.drain()
    said = [entry for delta in await stage.events(undisturbed, Delta) for entry in delta.logprobs or []]
    whole = tokens("hello", 0, 2)
    job_id = await cut(stage, [Started(2)], [Delta(0, whole.text, whole.token_ids, said[:2])], max_tokens=6, logprobs=2)
    await go_on(stage, job_id, engine := Recording(), "continued")
    assert [told.job.logprobs for told in engine.told] == [2]
    assert [entry for delta in await stage.events(job_id, Delta) for entry in delta.logprobs or []] == said
    assert len(said) == 6


async def test_cached_tokens_never_count_more_than_the_prompt(stage: Stage) -> None:
    job_id = await cut(stage, [Started(5)], [Delta(0, "a", [token_of("a").id])])
    replica = await stage.replica(HandEngine())
    run = await replica.run()
    run.emit(Step([token_of("b")], end="eos", cached_tokens=6))
    assert (await stage.ended(job_id)).usage == Usage(5, 2, 5)


async def test_a_log_that_cannot_be_read_is_a_failover_that_failed(stage: Stage) -> None:
    job_id = await cut(stage, [Started(5)])
    before = failovers()
    stage.faults.fail("read", "before")
    replica: Replica = await stage.replica()
    (await replica.run()).say("a", end="eos")
    await stage.ended(job_id)
    after = failovers()
    assert (after["failed"] - before["failed"], after["restarted"] - before["restarted"]) == (1, 1)
