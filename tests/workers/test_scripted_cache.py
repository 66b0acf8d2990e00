"""The scripted engine's model of a prefix cache, and of prompts that wait for each other."""

from __future__ import annotations

import asyncio

from headrace.broker.messages import Job, Text
from headrace.broker.models import ScriptedModel
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.engines.scripted_cache import PrefixCache
from tests.cluster.virtual import VirtualLoop


def test_whole_blocks_of_the_beginning_are_remembered() -> None:
    cache = PrefixCache(1000)
    assert cache.use(b"a" * 640) == 0
    assert cache.use(b"a" * 640) == 160
    assert cache.use(b"a" * 100 + b"b" * 540) == 16
    assert cache.use(b"b" + b"a" * 639) == 0


def test_what_was_used_longest_ago_is_forgotten() -> None:
    cache = PrefixCache(160)
    for text in (b"a" * 320, b"b" * 320, b"c" * 320):
        cache.use(text)
    assert [cache.use(text) for text in (b"a" * 320, b"c" * 320)] == [0, 80]


async def first_steps(model: ScriptedModel, texts: list[str]) -> list[tuple[float, int]]:
    """When the first step of each came, all given at once, and the prompt tokens that were cached."""
    engine, loop = ScriptedEngine(model), asyncio.get_running_loop()
    firsts: list[asyncio.Future[tuple[float, int]]] = [loop.create_future() for _ in texts]
    for text, first in zip(texts, firsts, strict=True):
        job = Job("0" * 32, "m", Text(text), max_tokens=3)

        def emit(step: Step, first: asyncio.Future[tuple[float, int]] = first) -> None:
            if not first.done():
                first.set_result((round(loop.time(), 2), step.cached_tokens))
            else:
                assert step.cached_tokens == 0

        engine.start(Generation(job, await engine.encode(job), [], 3), emit, lambda error: None)
    return list(await asyncio.gather(*firsts))


def run(model: ScriptedModel, texts: list[str]) -> list[tuple[float, int]]:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(first_steps(model, texts))


def test_a_prompt_waits_for_those_before_it_and_needs_no_prefill_of_what_is_cached() -> None:
    model = ScriptedModel(name="m", prefill_tokens_per_s=100, prefills_in_turn=True, cache_tokens=10_000)
    texts = ["a" * 640, "b" * 640, "a" * 640 + "c" * 400]
    assert run(model, texts) == [(1.6, 0), (3.2, 0), (4.2, 160)]


def test_prompts_do_not_wait_for_each_other_if_that_is_not_asked_for() -> None:
    assert run(ScriptedModel(name="m", prefill_tokens_per_s=100), ["a" * 400, "b" * 800]) == [(1.0, 0), (2.0, 0)]
