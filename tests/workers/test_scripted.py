"""The scripted engine: what anybody can compute of it, at the rate and with the end that the configuration says."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import pytest

from headrace.broker.errors import ContextLengthExceeded, EngineFailed
from headrace.broker.messages import Chat, Job, Message, Prompt, Sampling, Text, Tokens
from headrace.broker.models import ScriptedModel
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import DEFAULT_TOKENS, ScriptedEngine, oracle, prompt_text
from tests import jumping


class Sequence:
    """One sequence of an engine, and when each of its steps came."""

    def __init__(self, engine: ScriptedEngine, generation: Generation) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self.steps: list[Step] = []
        self.times: list[float] = []
        self.errors: list[Exception] = []
        self.has_begun = asyncio.Event()
        self.is_over = asyncio.Event()
        self.run: Run = engine.start(generation, self._emit, self._fail)

    def _emit(self, step: Step) -> None:
        assert not self.is_over.is_set()
        self.steps.append(step)
        self.has_begun.set()
        self.times.append(self._loop.time() - self._began_at)
        if step.end is not None:
            self.is_over.set()

    def _fail(self, error: Exception) -> None:
        assert not self.is_over.is_set()
        self.errors.append(error)
        self.is_over.set()

    @property
    def text(self) -> bytes:
        return b"".join(token.piece for step in self.steps for token in step.tokens)

    @property
    def ids(self) -> list[int]:
        return [token.id for step in self.steps for token in step.tokens]

    @property
    def end(self) -> str | None:
        return self.steps[-1].end


def generation(
    text: str = "hi",
    max_tokens: int | None = None,
    *,
    generated: list[int] | None = None,
    choice: int = 0,
    sampling: Sampling | None = None,
    logprobs: int | None = None,
) -> Generation:
    job = Job("", "m", Text(text), max_tokens, sampling=sampling or Sampling(), logprobs=logprobs)
    return Generation(job, [0] * -(-len(text) // 4), generated or [], max_tokens, choice)


def made(model: ScriptedModel, *generations: Generation) -> list[Sequence]:
    """Run sequences to their end, in no time."""

    async def main() -> list[Sequence]:
        engine = ScriptedEngine(model)
        sequences = [Sequence(engine, each) for each in generations]
        await asyncio.gather(*(sequence.is_over.wait() for sequence in sequences))
        await engine.close()
        return sequences

    return jumping.run(main())


def fast(**fields: Any) -> ScriptedModel:
    return ScriptedModel(name="m", **{"tokens_per_s": 0.0, **fields})


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_oracle_is_what_the_design_says() -> None:
    assert oracle("hi", 7, 1, 3) == zlib.crc32(b"hi|7|1|3")
    [sequence] = made(fast(), generation("hi", 2, sampling=Sampling(seed=7), choice=1))
    assert sequence.text == b" %08x %08x" % (zlib.crc32(b"hi|7|1|0"), zlib.crc32(b"hi|7|1|1"))


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (Text("plain"), "plain"),
        (Tokens([1, 22]), "1 22"),
        (Chat([Message("user", "first"), Message("assistant", "x"), Message("user", "last")]), "last"),
        (Chat([Message("user", "asked"), Message("assistant", "x")]), "asked"),
        (Chat([Message("system", "only")]), ""),
    ],
)
def test_the_oracle_reads_the_last_user_message_or_the_prompt(prompt: Prompt, text: str) -> None:
    assert prompt_text(prompt) == text


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [(Text(""), 0), (Text("abcd"), 1), (Text("abcde"), 2), (Text("éé€"), 2), (Tokens([5, 6, 7]), 3)],
)
async def test_a_prompt_counts_a_token_for_four_bytes(prompt: Prompt, tokens: int) -> None:
    assert len(await ScriptedEngine(fast()).encode(Job("", "m", prompt))) == tokens


@pytest.mark.parametrize("rate", [0.0, 50.0])
def test_a_sequence_continues_where_another_has_stopped(rate: float) -> None:
    model = fast(tokens_per_s=rate)
    [whole] = made(model, generation(max_tokens=50))
    [rest] = made(model, generation(max_tokens=30, generated=whole.ids[:20]))
    assert rest.ids == whole.ids[20:]
    assert rest.end == whole.end == "limit"


def test_a_token_is_what_it_was_when_it_was_made() -> None:
    [sequence] = made(fast(script=["a", [0xF0, 0x9F], "<|im_end|>"]), generation())
    tokens = [token for step in sequence.steps for token in step.tokens]
    assert [token.piece for token in tokens] == [b"a", b"\xf0\x9f", b"<|im_end|>"]
    assert [token.is_special for token in tokens] == [False, False, True]
    engine = ScriptedEngine(fast(script=["a", [0xF0, 0x9F], "<|im_end|>"]))
    assert [engine.token(token.id) for token in tokens] == tokens


def test_log_probabilities_are_of_different_tokens_and_sum_to_less_than_one() -> None:
    for model in (fast(), fast(script=["a", "b", "c", "d", "e"])):
        [sequence] = made(model, generation(max_tokens=5, logprobs=3))
        for step in sequence.steps:
            assert step.logprobs is not None
            for token, logprob in zip(step.tokens, step.logprobs, strict=True):
                assert (logprob.token_id, logprob.piece) == (token.id, token.piece)
                assert logprob.top[0].token_id == token.id
                assert len({each.token_id for each in logprob.top}) == 3
                assert sum(2.718281828**each.logprob for each in logprob.top) < 1


# -- how it ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1000.0])
@pytest.mark.parametrize(
    ("max_tokens", "context", "tokens", "end"),
    [
        (None, 10_000, DEFAULT_TOKENS, "eos"),
        (1, 10_000, 1, "limit"),
        (DEFAULT_TOKENS, 10_000, DEFAULT_TOKENS, "limit"),
        (300, 10_000, 300, "limit"),
        (10**9, 101, 100, "limit"),
        (None, 41, 40, "limit"),
        (0, 10_000, 0, "limit"),
    ],
    ids=["no limit", "one", "as many as by default", "more", "to the end of the context", "no room", "none"],
)
def test_limits(rate: float, max_tokens: int | None, context: int, tokens: int, end: str) -> None:
    [sequence] = made(fast(tokens_per_s=rate, context_tokens=context), generation("hi", max_tokens))
    assert (len(sequence.ids), sequence.end) == (tokens, end)


@pytest.mark.parametrize(
    ("script_end", "max_tokens", "context", "tokens", "end"),
    [
        ("eos", None, 1000, 100, "eos"),
        ("limit", None, 1000, 100, "limit"),
        ("eos", 100, 1000, 100, "limit"),
        ("eos", 101, 1000, 100, "eos"),
        ("eos", 3, 1000, 3, "limit"),
        ("error", 3, 1000, 3, "limit"),
        ("eos", None, 81, 80, "limit"),
    ],
)
def test_scripts_end(script_end: str, max_tokens: int | None, context: int, tokens: int, end: str) -> None:
    model = fast(script=["x"] * 100, script_end=script_end, context_tokens=context)
    [sequence] = made(model, generation("hi", max_tokens))
    assert (len(sequence.ids), sequence.end, sequence.errors) == (tokens, end, [])


@pytest.mark.parametrize("max_tokens", [None, 2, 100])
def test_a_script_may_end_in_an_error_after_its_last_token(max_tokens: int | None) -> None:
    [sequence] = made(fast(script=["A", "B"], script_end="error"), generation("hi", max_tokens))
    assert sequence.text == b"AB"
    [error] = sequence.errors
    assert isinstance(error, EngineFailed)


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    engine = ScriptedEngine(fast(context_tokens=2))
    assert len(await engine.encode(Job("", "m", Text("abcd")))) == 1
    with pytest.raises(ContextLengthExceeded) as raised:
        await engine.encode(Job("", "m", Text("abcdefgh")))
    assert raised.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as raised:
        await engine.encode(Job("", "m", Chat([Message("user", "abcdefgh")])))
    assert raised.value.param == "messages"


# -- when it says it --------------------------------------------------------------------------------------------------


def test_tokens_come_at_the_rate_one_by_one() -> None:
    sequences = made(fast(tokens_per_s=50.0), *(generation(f"{i}", 26) for i in range(20)))
    for sequence in sequences:
        assert [len(step.tokens) for step in sequence.steps] == [1] * 26
        assert sequence.times[-1] - sequence.times[0] == pytest.approx(0.5, abs=0.05)


def test_a_prompt_takes_its_time() -> None:
    [sequence] = made(fast(prefill_tokens_per_s=100.0), generation("x" * 200, 1))
    assert sequence.times[0] == pytest.approx(0.5, abs=0.05)


def test_loading_takes_its_time_and_says_how_far_it_is() -> None:
    shares: list[float] = []

    async def main() -> float:
        began_at = asyncio.get_running_loop().time()
        await ScriptedEngine(fast(startup_s=2.0)).load(lambda what, share: shares.append(share))
        return asyncio.get_running_loop().time() - began_at

    assert jumping.run(main()) == pytest.approx(2.0, abs=0.1)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# -- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 100.0])
async def test_nothing_is_said_after_a_cancel(rate: float) -> None:
    engine = ScriptedEngine(fast(tokens_per_s=rate))
    cancelled, other = Sequence(engine, generation("a", 300)), Sequence(engine, generation("b", 20))
    await cancelled.has_begun.wait()
    cancelled.run.cancel()
    said = len(cancelled.steps)
    async with asyncio.timeout(5):
        await other.is_over.wait()
    assert len(cancelled.steps) == said
    assert len(other.ids) == 20
    await engine.close()


async def test_a_sequence_may_be_cancelled_during_its_prompt() -> None:
    engine = ScriptedEngine(fast(prefill_tokens_per_s=1000.0))
    slow, other = Sequence(engine, generation("x" * 400, 5)), Sequence(engine, generation("x" * 800, 5))
    slow.run.cancel()
    async with asyncio.timeout(5):
        await other.is_over.wait()
    assert slow.steps == []
    await engine.close()


async def test_a_listener_that_fails_stops_no_other_sequence() -> None:
    engine = ScriptedEngine(fast(tokens_per_s=1000.0))

    def break_down(step: Step) -> None:
        raise RuntimeError("a bug in whoever listens")

    failures: list[Exception] = []
    engine.start(generation("a", 5), break_down, failures.append)
    other = Sequence(engine, generation("b", 5))
    async with asyncio.timeout(5):
        await other.is_over.wait()
    assert [type(failure) for failure in failures] == [RuntimeError]
    await engine.close()
