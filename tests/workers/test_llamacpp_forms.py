"""The llama.cpp engine on a real model: answers bound to a form, tools in words, and jobs that generate nothing."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed
from headrace.broker.messages import (
    Batch,
    Chat,
    Grammar,
    Job,
    JsonObject,
    JsonSchema,
    Kind,
    Message,
    Prompt,
    Regex,
    Sampling,
    Text,
    Tokens,
    Tool,
    ToolCall,
)
from headrace.workers.engines.llamacpp import LlamacppEngine
from tests.workers.llamacpp_runs import CONTEXT, DATA_DIR, NEVER_ENDS, PARIS, STORY, begin, default_model, encoded

pytestmark = pytest.mark.asyncio(loop_scope="module")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = Tool(
    "weather",
    "Tells the weather",
    {"properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]},
)
TIME = Tool("time")
ASKED = Chat([Message("user", "What is the weather in Paris?")])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamacppEngine]:
    engine = LlamacppEngine(msgspec.structs.replace(default_model(), embeddings=True), DATA_DIR)
    await engine.load(lambda what, share: None)
    yield engine
    await engine.close()


async def refusal(engine: LlamacppEngine, prompt: Prompt, **fields: Any) -> str | None:
    """The field that a job is refused for."""
    with pytest.raises(BadRequest) as raised:
        await encoded(engine, prompt, **fields)
    return raised.value.param


# -- constraints ------------------------------------------------------------------------------------------------------


async def test_an_answer_keeps_to_a_schema_and_ends_with_it(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, PARIS, 60, constraint=JsonSchema(CITY))).finish()
    value = json.loads(stream.data)
    assert set(value) == {"city", "days"}
    assert isinstance(value["days"], int)
    assert stream.end == "eos"


async def test_an_answer_may_be_any_object(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, PARIS, 60, constraint=JsonObject())).finish()
    assert isinstance(json.loads(stream.data), dict)


async def test_an_answer_keeps_to_a_grammar_or_a_pattern(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, PARIS, constraint=Grammar('root ::= "yes" | "no"'))).finish()
    assert stream.data in (b"yes", b"no")
    stream = await (await begin(engine, PARIS, constraint=Regex(r"[A-Z]{3}/\d{2}\/\nx"))).finish()
    assert re.fullmatch(rb"[A-Z]{3}/\d{2}/\nx", stream.data)


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        (JsonSchema({"type": "thing"}), "response_format"),
        (JsonSchema({"type": "array", "uniqueItems": True}), "response_format"),
        (JsonSchema({"$ref": "#/nowhere"}), "response_format"),
        (Grammar("root ::= nothing"), "grammar"),
        (Grammar('start ::= "a"'), "grammar"),
        (Grammar('root ::= root "a"'), "grammar"),
        (Grammar(""), "grammar"),
        (Grammar('root ::= "a" [^\\x00-\\U0010FFFF]'), "grammar"),
        (Grammar("root ::= " + "(" * 100_000 + '"a"' + ")" * 100_000), "grammar"),
        (JsonSchema({"$ref": "#"}), "response_format"),
        (Regex("(a"), "regex"),
        (Regex("a(?=b)"), "regex"),
        (Regex("\0"), "regex"),
    ],
)
async def test_a_form_that_cannot_be_kept_is_refused_and_not_left_out(
    engine: LlamacppEngine, constraint: Any, param: str
) -> None:
    assert await refusal(engine, PARIS, constraint=constraint) == param


async def test_a_pattern_cannot_bring_rules_of_its_own(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, PARIS, constraint=Regex("a/\nstart: /b"))).finish()
    assert stream.data == b"a/\nstart: /b"


async def test_an_answer_that_llamacpp_lets_out_of_its_form_fails(engine: LlamacppEngine) -> None:
    """Nothing keeps to this schema, but neither llama.cpp nor its check knows."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    stream = await begin(engine, PARIS, 30, constraint=JsonSchema(schema))
    await stream.until(lambda: stream.errors or stream.end)
    assert [type(error) for error in stream.errors] == [EngineFailed]
    assert '{"a": {"a": {"a": '.startswith(stream.data.decode())


async def test_what_is_bound_to_a_form_cannot_be_continued(engine: LlamacppEngine) -> None:
    def can_continue(**fields: Any) -> bool:
        return engine.can_continue(Job("", "m", PARIS, **fields))

    assert can_continue()
    assert can_continue(tools=[WEATHER], tool_choice="none")
    assert not can_continue(constraint=JsonObject())
    assert not can_continue(tools=[WEATHER])


# -- tools of a model whose template knows none -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "name"),
    [({"tool_choice": "required"}, "weather"), ({"tool_name": "time"}, "time"), ({"tool_name": "weather"}, "weather")],
)
async def test_a_call_that_must_be_is_one(engine: LlamacppEngine, choice: dict[str, Any], name: str) -> None:
    stream = await (await begin(engine, ASKED, 60, tools=[WEATHER, TIME], **choice)).finish()
    [(called, arguments)] = stream.calls
    assert (called, set(json.loads(arguments))) == (name, {"city"} if name == "weather" else set())
    assert (stream.text, stream.end) == ("", "tool_calls")
    assert stream.data.decode() == f'{{"name": "{name}", "arguments": {arguments}}}'
    assert sum(len(step.tokens) for step in stream.steps) == len(stream.ids)


async def test_a_call_may_be_words(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, ASKED, 12, tools=[WEATHER])).finish()
    assert (stream.calls, stream.end) == ([], "limit")
    assert stream.text == stream.data.decode() != ""


async def test_a_call_that_is_cut_by_the_limit_says_what_there_is(engine: LlamacppEngine) -> None:
    whole = await (await begin(engine, ASKED, 60, tools=[WEATHER], tool_choice="required")).finish()
    for limit in range(1, len(whole.ids)):
        cut = await (await begin(engine, ASKED, limit, tools=[WEATHER], tool_choice="required")).finish()
        assert cut.end == "limit"
        assert len(cut.ids) == limit
        arguments = cut.calls[0][1] if cut.calls else ""
        after = cut.data.decode().partition('"arguments": ')[2]
        assert arguments == after.removesuffix("}" if after == whole.calls[0][1] + "}" else "")


async def test_tools_calls_and_results_are_words_for_such_a_template(engine: LlamacppEngine) -> None:
    call = ToolCall("1", "weather", '{"city":"Rome"}')
    turns = [*ASKED.messages, Message("assistant", "", [call]), Message("tool", "sunny<|im_end|>", name="weather")]
    ids = await encoded(engine, Chat(turns), tools=[WEATHER])
    text = b"".join(engine.token(i).piece for i in ids).decode()
    assert '"name": "weather", "description": "Tells the weather"' in text
    assert '{"name": "weather", "arguments": {"city":"Rome"}}' in text
    assert "weather returned: sunny<|im_end|>" in text
    roles = [engine.token(i).piece for i in ids].count(b"<|im_start|>")
    assert roles == 5
    assert "Tells" not in (await encoded_text(engine, Chat(turns), tools=[WEATHER], tool_choice="none"))


async def encoded_text(engine: LlamacppEngine, prompt: Prompt, **fields: Any) -> str:
    return b"".join(engine.token(i).piece for i in await encoded(engine, prompt, **fields)).decode()


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        (STORY, {"tools": [WEATHER]}, "tools"),
        (ASKED, {"tools": [WEATHER], "tool_name": "other"}, "tool_choice"),
        (ASKED, {"tools": [WEATHER], "constraint": JsonObject()}, "response_format"),
        (ASKED, {"tools": [Tool("f", parameters={"type": "thing"})]}, "tools"),
        (ASKED, {"tools": [Tool('f"\n<|im_end|>')]}, "tools"),
        (ASKED, {"tools": [Tool("")], "tool_choice": "none"}, "tools"),
        (Chat([Message("assistant", "The")], is_open=True), {"tools": [WEATHER]}, "messages"),
        (Chat([Message("user", "The")], is_open=True), {}, "messages"),
        (ASKED, {"think": True}, "think"),
        (STORY, {"think": True}, "think"),
        (STORY, {"suffix": "end"}, "suffix"),
        (ASKED, {"suffix": "end"}, "suffix"),
        (Batch([]), {}, "prompt"),
    ],
)
async def test_what_this_model_cannot_do_is_refused_with_its_field(
    engine: LlamacppEngine, prompt: Prompt, fields: dict[str, Any], param: str
) -> None:
    assert await refusal(engine, prompt, **fields) == param


async def test_a_suffix_is_put_where_the_vocabulary_says(
    engine: LlamacppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This vocabulary has no tokens for it, so others stand in for them."""
    monkeypatch.setattr(engine._ready().vocab, "fim", (3, 5, 6))
    before, after = await encoded(engine, Text("def f(")), await encoded(engine, Text("return x"))
    assert await encoded(engine, Text("def f("), suffix="return x") == [3, *before, 5, *after, 6]
    assert await refusal(engine, Tokens([1]), suffix="x") == "suffix"
    ids = await encoded(engine, Text("<|im_end|>"), suffix="<|im_end|>")
    assert [i for i in ids if engine.token(i).is_special] == [3, 5, 6]


# -- more of a request ------------------------------------------------------------------------------------------------


async def test_an_answer_goes_on_in_its_middle(engine: LlamacppEngine) -> None:
    begun = Message("assistant", "The capital of France<|im_end|>")
    ids = await encoded(engine, Chat([*PARIS.messages, begun], is_open=True))
    before = await encoded(engine, PARIS)
    assert ids[: len(before)] == before
    rest = ids[len(before) :]
    assert b"".join(engine.token(i).piece for i in rest).decode() == begun.content
    assert not any(engine.token(i).is_special for i in rest)


async def test_the_end_may_be_ignored(engine: LlamacppEngine) -> None:
    stream = await (await begin(engine, PARIS, 30, ignore_eos=True)).finish()
    assert (len(stream.ids), stream.end) == (30, "limit")


async def test_repetition_is_what_its_penalty_prevents(engine: LlamacppEngine) -> None:
    async def ids(**penalty: Any) -> list[int]:
        sampling = msgspec.structs.replace(NEVER_ENDS, **penalty)
        return (await (await begin(engine, Text("la la la la la la la"), 12, sampling=sampling)).finish()).ids

    plain, penalised = await ids(), await ids(repeat_penalty=10.0)
    assert len(set(penalised)) > len(set(plain))
    assert await ids(repeat_penalty=10.0, repeat_last_n=0) == plain


async def test_typical_sampling_is_passed_on(engine: LlamacppEngine) -> None:
    async def ids(typical_p: float) -> list[int]:
        sampling = Sampling(temperature=2.0, seed=3, typical_p=typical_p)
        return (await (await begin(engine, STORY, 8, sampling=sampling)).finish()).ids

    assert await ids(1.0) != await ids(0.01)


# -- jobs that generate nothing ---------------------------------------------------------------------------------------


async def ask(engine: LlamacppEngine, kind: Kind, prompt: Prompt, **fields: Any) -> tuple[dict[str, Any], int]:
    result, tokens = await engine.answer(Job("", "m", prompt, kind=kind, **fields))
    return result.data, tokens


@pytest.mark.parametrize("text", ["", "Hi <|im_end|>", "日本語 👩‍👩‍👧 \x00"])
async def test_what_is_tokenized_can_be_detokenized(engine: LlamacppEngine, text: str) -> None:
    data, tokens = await ask(engine, "tokenize", Text(text), add_special=True)
    assert tokens == len(data["tokens"])
    assert b"".join(data["pieces"]).decode() == text
    assert await ask(engine, "detokenize", Tokens(data["tokens"])) == ({"text": text}, tokens)


async def test_a_rendered_conversation_is_what_is_generated_from(engine: LlamacppEngine) -> None:
    for fields in ({}, {"tools": [WEATHER]}):
        ids = await encoded(engine, ASKED, **fields)
        text = b"".join(engine.token(i).piece for i in ids).decode()
        assert await ask(engine, "render", ASKED, **fields) == ({"text": text}, len(ids))
        assert await ask(engine, "count", ASKED, **fields) == ({"tokens": len(ids)}, len(ids))
        assert (await ask(engine, "tokenize", ASKED, **fields))[0]["tokens"] == ids


async def test_embeddings_are_unit_vectors_that_know_what_is_alike(engine: LlamacppEngine) -> None:
    inputs = [Text("The cat sat on the mat."), Text("A cat was sitting on a mat."), Text("def f(x): return x")]
    data, tokens = await ask(engine, "embed", Batch([*inputs, Tokens(await encoded(engine, inputs[0]))]))
    size = engine.capabilities.embeddings
    vectors = [struct.unpack(f"<{size}f", each) for each in data["embeddings"]]
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 4, abs=1e-5)
    assert data["tokens"] == [len(await encoded(engine, each)) for each in [*inputs, inputs[0]]]
    assert tokens == sum(data["tokens"])
    assert vectors[3] == pytest.approx(vectors[0], abs=1e-5)
    assert math.dist(vectors[0], vectors[1]) < math.dist(vectors[0], vectors[2])
    alone, _ = await ask(engine, "embed", inputs[0])
    assert struct.unpack(f"<{size}f", alone["embeddings"][0]) == pytest.approx(vectors[0], abs=1e-5)


async def test_embeddings_and_answers_are_made_at_the_same_time(engine: LlamacppEngine) -> None:
    stream = await begin(engine, PARIS)
    await ask(engine, "embed", Batch([Text("word " * 100)] * 3))
    assert b"Paris" in (await stream.finish()).data


async def test_an_embedding_of_a_whole_context_fits_and_of_more_does_not(engine: LlamacppEngine) -> None:
    _, tokens = await ask(engine, "embed", Tokens([504] * (CONTEXT - 1)))
    assert tokens == CONTEXT - 1
    with pytest.raises(ContextLengthExceeded) as raised:
        await ask(engine, "embed", Batch([Text("a"), Tokens([504] * CONTEXT)]))
    assert raised.value.param == "input"


@pytest.mark.parametrize(
    ("kind", "prompt", "param"),
    [
        ("tokenize", Tokens([1]), "prompt"),
        ("detokenize", Text("x"), "prompt"),
        ("detokenize", Tokens([49_152]), "tokens"),
        ("detokenize", Tokens([-1]), "tokens"),
        ("render", Text("x"), "prompt"),
        ("count", Batch([]), "prompt"),
        ("embed", ASKED, "input"),
        ("embed", Batch([Text("x"), Text("")]), "input"),
        ("embed", Batch([Tokens([-1])]), "input"),
    ],
)
async def test_what_a_kind_cannot_read_is_refused(
    engine: LlamacppEngine, kind: Kind, prompt: Prompt, param: str
) -> None:
    with pytest.raises(BadRequest) as raised:
        await ask(engine, kind, prompt)
    assert raised.value.param == param


async def test_what_the_model_is_and_can_stands_in_the_registry(engine: LlamacppEngine) -> None:
    about: dict[str, Any] = engine.capabilities.about()
    details = json.loads(str(about.pop("details")))
    assert about == {
        "context_tokens": CONTEXT,
        "tools": 1,
        "constraints": "json,grammar,regex",
        "reasoning": 0,
        "embeddings": 576,
        "fim": 0,
    }
    assert "message['role']" in details.pop("chat_template")
    assert len(details.pop("digest")) == 64
    assert details == {
        "format": "gguf",
        "family": "llama",
        "parameters": 134_515_008,
        "quantization": "Q4_1",
        "size_bytes": 96_576_768,
        "context_tokens": 8192,
        "vocabulary": 49_152,
        "bos": "<|im_start|>",
        "eos": "<|im_end|>",
    }
