"""Sequences on real engines, as the tests start and watch them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.broker.messages import Chat, Job, Message, Prompt, Sampling, Text, TokenLogprob
from headrace.broker.models import LlamacppModel
from headrace.broker.settings import load
from headrace.workers.engines.protocol import Engine, Generation, Run, Step, Token

REPO = Path(__file__).parents[2]
DATA_DIR = os.environ.get("HEADRACE_TEST_DATA", str(REPO / ".headrace"))
CONTEXT = 512
GREEDY = Sampling(temperature=0)
NEVER_ENDS = Sampling(temperature=0, logit_bias={0: -1000, 2: -1000, 4: -1000})
STORY = Text("A long story about a river, a mill and a fox:")
PARIS = Chat([Message("user", "The capital of France is")])


def default_model() -> LlamacppModel:
    """The model of the default configuration, in a size for tests."""
    model = load(REPO / "headrace.yaml", {}).models[0]
    assert isinstance(model, LlamacppModel)
    return msgspec.structs.replace(model, slots=2, context_tokens=CONTEXT, threads=1)


class Stream:
    """One started sequence: everything that it was given."""

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self.steps: list[Step] = []
        self.errors: list[Exception] = []
        self._changed = asyncio.Event()
        self.run: Run = engine.start(generation, self._emit, self._fail)

    def _emit(self, step: Step) -> None:
        self.steps.append(step)
        self._changed.set()

    def _fail(self, error: Exception) -> None:
        self.errors.append(error)
        self._changed.set()

    @property
    def tokens(self) -> list[Token]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def data(self) -> bytes:
        return b"".join(token.piece for token in self.tokens)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for step in self.steps for entry in step.logprobs or ()]

    @property
    def text(self) -> str:
        """What was told as text; that of plain tokens is `data`."""
        return "".join(step.text or "" for step in self.steps)

    @property
    def reasoning(self) -> str:
        return "".join(step.reasoning or "" for step in self.steps)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each tool call; an id comes once, and with the name."""
        calls: dict[int, tuple[str, str]] = {}
        for delta in [delta for step in self.steps for delta in step.tool_calls or ()]:
            assert bool(delta.id) == bool(delta.name) == (delta.index not in calls)
            name, arguments = calls.get(delta.index, ("", ""))
            calls[delta.index] = (name + delta.name, arguments + delta.arguments)
        return list(calls.values())

    @property
    def end(self) -> str | None:
        return self.steps[-1].end if self.steps else None

    async def until(self, is_true: Callable[[], object], timeout_s: float = 20.0) -> Stream:
        async with asyncio.timeout(timeout_s):
            while not is_true():
                self._changed.clear()
                await self._changed.wait()
        return self

    async def finish(self) -> Stream:
        await self.until(lambda: self.end or self.errors)
        assert self.errors == []
        assert [step.end for step in self.steps[:-1]] == [None] * (len(self.steps) - 1)
        return self


async def begin(
    engine: Engine,
    prompt: Prompt,
    max_tokens: int | None = 16,
    *,
    sampling: Sampling = GREEDY,
    generated: list[int] | None = None,
    choice: int = 0,
    **fields: Any,
) -> Stream:
    """`fields` are more of the job."""
    job = Job("", "m", prompt, max_tokens, sampling=sampling, **fields)
    return Stream(engine, Generation(job, await engine.encode(job), generated or [], max_tokens, choice))


async def encoded(engine: Engine, prompt: Prompt, **fields: Any) -> list[int]:
    return await engine.encode(Job("", "m", prompt, **fields))
