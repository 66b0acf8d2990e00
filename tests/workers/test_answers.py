"""Jobs that generate nothing: one result and the end, whatever happens in between."""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker import messages
from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import (
    Batch,
    Chat,
    Ended,
    Event,
    Job,
    Kind,
    Message,
    Prompt,
    Result,
    Started,
    Text,
    Tokens,
    Tool,
    ToolCall,
    Usage,
)
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Append
from headrace.workers.engines.scripted import ScriptedEngine, oracle
from tests.support import eventually
from tests.workers.replicas import HandEngine, MakeStage, Stage

HELLO = Result({"tokens": 2})


class Answering(HandEngine):
    """It answers when the test lets it, and knows how often it was asked."""

    def __init__(self, answer: Result | Exception = HELLO) -> None:
        super().__init__()
        self.asked: list[Job] = []
        self.given_up = 0
        self.advance: Callable[[], None] = lambda: None
        self._answer = answer

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        self.asked.append(job)
        self.advance = advance
        try:
            await self.encoding.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer, 5


def scripted(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=0, **fields))


async def test_the_log_is_started_result_and_end(stage: Stage) -> None:
    job_id = await stage.admit(kind="count")
    await stage.replica(Answering())
    ended = await stage.ended(job_id)
    assert (ended.status, ended.usage, ended.error) == ("done", Usage(5, 0), None)
    assert await stage.events(job_id, Started, Result, Ended) == [Started(5), HELLO, ended]


async def test_the_callers_error_is_said_with_its_field(stage: Stage) -> None:
    job_id = await stage.admit(kind="embed")
    replica = await stage.replica(Answering(BadRequest("it has no embeddings", param="model")))
    ended = await stage.ended(job_id)
    assert ended.error is not None
    assert (ended.status, ended.error.code, ended.error.param) == ("failed", "invalid_request", "model")
    assert await stage.events(job_id, Started, Result) == []
    await eventually(lambda: replica.worker.running == 0)


async def test_a_bug_in_an_answer_says_nothing_of_itself(stage: Stage) -> None:
    job_id = await stage.admit(kind="embed")
    await stage.replica(Answering(RuntimeError("at /srv/app")))
    ended = await stage.ended(job_id)
    assert ended.error is not None
    assert (ended.error.code, "/srv" in ended.error.message) == ("engine_error", False)


async def test_d_an_answer_that_nobody_wants_any_more_is_given_up(stage: Stage) -> None:
    engine = Answering()
    engine.encoding.clear()
    job_id = await stage.admit(kind="embed")
    replica = await stage.replica(engine)
    await eventually(lambda: engine.asked)
    await stage.plain.cancel(job_id, "test")
    assert (await stage.ended(job_id)).status == "cancelled"
    await eventually(lambda: replica.worker.running == 0)
    assert engine.given_up == 1
    assert await stage.events(job_id, Started, Result) == []


async def test_an_answer_that_is_handed_back_is_made_by_another(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.0)
    engine = Answering()
    engine.encoding.clear()
    job_id = await stage.admit(kind="count")
    replica = await stage.replica(engine)
    await eventually(lambda: engine.asked)
    await replica.worker.drain()
    assert engine.given_up == 1
    await stage.replica(Answering())
    assert (await stage.ended(job_id)).status == "done"
    assert await stage.events(job_id, Result) == [HELLO]


async def test_an_answer_that_takes_long_is_not_stuck_while_it_advances(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.3, drain_s=0.0)
    engine = Answering()
    engine.encoding.clear()
    job_id = await stage.admit(kind="embed")
    replica = await stage.replica(engine)
    await eventually(lambda: engine.asked)
    began_at = time.monotonic()

    def advances() -> bool:
        engine.advance()
        replica.worker.check_health()
        return time.monotonic() - began_at > 0.6

    await eventually(advances)
    engine.encoding.set()
    assert (await stage.ended(job_id)).status == "done"


async def test_an_engine_that_hangs_in_an_answer_is_given_up(make_stage: MakeStage) -> None:
    stage = await make_stage(step_timeout_s=0.2)
    engine = Answering()
    engine.encoding.clear()
    await stage.admit(kind="embed")
    replica = await stage.replica(engine)
    with pytest.raises(EngineFailed, match="no step"):
        await asyncio.wait_for(replica.task, 5)


CRASHES: dict[str, tuple[list[list[Event]], int]] = {
    "before Started": ([], 1),
    "after Started": ([[Started(5)]], 1),
    "after Result": ([[Started(5), HELLO]], 0),
    "after Result, in an entry of its own": ([[Started(5)], [HELLO]], 0),
}


@pytest.mark.parametrize("crash", CRASHES)
async def test_e2_killed_anywhere_there_is_one_result_and_one_end(stage: Stage, crash: str) -> None:
    entries, asked = CRASHES[crash]
    job_id = await stage.admit(kind="count")
    await stage.plain.claim(0, "former", "m", 1)
    for n, events in enumerate(entries, 1):
        data = messages.encode(messages.Entry(n, events))
        assert (await stage.plain.lane(0).exchange([], [Append(job_id, f"1-{n}", data)], [])).appends == ["ok"]
    await stage.plain.release("former", job_id, None, None)
    await stage.replica(engine := Answering())
    ended = await stage.ended(job_id)
    assert (ended.status, ended.usage) == ("done", Usage(5, 0))
    assert await stage.events(job_id, Result) == [HELLO]
    assert len(engine.asked) == asked


# -- what the scripted engine answers ---------------------------------------------------------------------------------


async def ask(engine: ScriptedEngine, kind: Kind, prompt: Prompt, **fields: Any) -> tuple[dict[str, Any], int]:
    result, tokens = await engine.answer(Job("", "m", prompt, kind=kind, **fields))
    return result.data, tokens


@pytest.mark.parametrize("text", ["", "abc", "abcd", "abcde", "wörld 日本語 😀\x00!"])
async def test_what_is_tokenized_can_be_detokenized(text: str) -> None:
    data, tokens = await ask(scripted(), "tokenize", Text(text))
    assert tokens == len(data["tokens"]) == -(-len(text.encode()) // 4)
    assert b"".join(data["pieces"]) == text.encode()
    back, _ = await ask(scripted(), "detokenize", Tokens(data["tokens"]))
    assert back == {"text": text}


async def test_the_oracles_tokens_can_be_detokenized_and_others_cannot() -> None:
    word = oracle("x", 0, 0, 0)
    assert (await ask(scripted(), "detokenize", Tokens([word])))[0] == {"text": f" {word:08x}"}
    for unknown in (-1, 5 << 32, 1 << 40):
        with pytest.raises(BadRequest) as raised:
            await ask(scripted(), "detokenize", Tokens([unknown]))
        assert raised.value.param == "tokens"


async def test_the_count_is_what_a_generation_would_be_charged() -> None:
    prompt = Chat([Message("system", "Be kind."), Message("user", "Hello?")])
    ids = await scripted().encode(Job("", "m", prompt))
    assert await ask(scripted(), "count", prompt) == ({"tokens": len(ids)}, len(ids))


async def test_a_conversation_is_rendered_with_everything_in_it() -> None:
    call = ToolCall("1", "f", "{}")
    turns = [Message("user", "Hi"), Message("assistant", "A", [call], reasoning="R"), Message("tool", "T")]
    data, _ = await ask(scripted(), "render", Chat(turns), tools=[Tool("f")])
    assert data["text"].splitlines() == [
        '[{"name":"f"}]',
        "<|user|>",
        "Hi",
        "<|assistant|>",
        "<|think|>R",
        "A",
        '[{"id":"1","name":"f","arguments":"{}"}]',
        "<|tool|>",
        "T",
        "<|assistant|>",
    ]
    begun = Chat([Message("assistant", "The")], is_open=True)
    data, _ = await ask(scripted(), "render", begun)
    assert data == {"text": "<|assistant|>\nThe"}
    ids = (await ask(scripted(), "tokenize", begun))[0]["tokens"]
    assert (await ask(scripted(), "detokenize", Tokens(ids)))[0] == data


async def test_embeddings_are_unit_vectors_one_an_input_and_always_the_same() -> None:
    engine = scripted(dimensions=40)
    data, tokens = await ask(engine, "embed", Batch([Text("ab"), Tokens([1, 2]), Text("abcde"), Text("ab")]))
    vectors = [struct.unpack("<40f", each) for each in data["embeddings"]]
    assert (data["tokens"], tokens) == ([1, 2, 2, 1], 6)
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 4)
    assert vectors[0] == vectors[3]
    assert len(set(vectors)) == 3
    alone, _ = await ask(engine, "embed", Text("ab"))
    assert alone["embeddings"] == data["embeddings"][:1]


@pytest.mark.parametrize(
    ("kind", "prompt", "param"),
    [
        ("tokenize", Batch([]), "prompt"),
        ("detokenize", Text("x"), "prompt"),
        ("render", Text("x"), "prompt"),
        ("count", Batch([]), "prompt"),
        ("embed", Chat([]), "prompt"),
        ("embed", Batch([Text("x"), Text("x" * 100)]), "input"),
    ],
)
async def test_what_a_kind_cannot_read_is_refused(kind: Kind, prompt: Prompt, param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        await ask(scripted(context_tokens=16), kind, prompt)
    assert raised.value.param == param
