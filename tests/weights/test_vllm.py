"""What vLLM's own code does for a job: constraints, tool calls and reasoning, also when an answer is continued."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import (
    Chat,
    Constraint,
    Grammar,
    Job,
    JsonObject,
    JsonSchema,
    Message,
    Regex,
    Sampling,
    Text,
    Tokens,
    Tool,
)
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.vllm import VllmEngine
from tests.weights.conftest import Loaded
from tests.workers.llamacpp_runs import GREEDY, PARIS, STORY, Stream

pytestmark = pytest.mark.asyncio(loop_scope="session")

WEATHER = Tool(
    "get_weather",
    "The weather of a city",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = Chat([Message("user", "What is the weather in Paris?")])


@pytest.fixture
def engine(vllm: Loaded) -> VllmEngine:
    assert isinstance(vllm.engine, VllmEngine)
    return vllm.engine


def job_of(prompt: Any = PARIS, **fields: Any) -> Job:
    return Job("", "m", prompt, fields.pop("max_tokens", 48), sampling=fields.pop("sampling", GREEDY), **fields)


async def made(engine: VllmEngine, job: Job, generated: list[int] | None = None) -> Stream:
    prompt_ids, so_far = await engine.encode(job), generated or []
    left = None if job.max_tokens is None else job.max_tokens - len(so_far)
    return await Stream(engine, Generation(job, prompt_ids, so_far, left)).finish()


@pytest.mark.parametrize(
    "constraint", [JsonSchema(PERSON), Regex("[ab]{3} 😀"), Grammar('root ::= "yes " [0-9] [0-9]'), JsonObject()]
)
async def test_the_answer_follows_the_constraint_and_so_does_any_continuation(
    engine: VllmEngine, constraint: Constraint
) -> None:
    job = job_of(
        Chat([Message("user", "Give me a JSON object with a name and an age.")]), constraint=constraint, max_tokens=24
    )
    whole = await made(engine, job)
    said = whole.data.decode()
    match constraint:
        case JsonSchema():
            assert set(json.loads(said)) == {"name", "age"}
        case Regex():
            assert said[:3].strip("ab") == ""
            assert said[3:] == " 😀"
        case Grammar():
            assert said[:4] == "yes "
            assert said[4:].isdigit()
        case JsonObject():
            assert said.startswith("{")
    for cut in range(1, len(whole.ids), 4):
        rest = await made(engine, job, whole.ids[:cut])
        assert whole.ids[:cut] + rest.ids == whole.ids


async def test_a_constraint_that_cannot_be_read_is_refused_before_it_runs(engine: VllmEngine) -> None:
    for constraint in (Regex("(["), Grammar("nonsense"), JsonSchema({"type": "nonsense"})):
        with pytest.raises(BadRequest) as raised:
            await engine.encode(job_of(constraint=constraint))
        assert raised.value.param == "response_format"


async def test_a_required_tool_is_called_and_its_arguments_follow_the_schema(engine: VllmEngine) -> None:
    job = job_of(ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    stream = await made(engine, job)
    assert stream.end == "tool_calls"
    assert stream.text.strip() == ""
    [(name, arguments)] = stream.calls
    assert name == "get_weather"
    assert json.loads(arguments)["city"] in ("Paris", "Rome")
    assert stream.ids


async def test_a_named_tool_is_called(engine: VllmEngine) -> None:
    other = Tool("get_time", "The time", {"type": "object", "properties": {}, "additionalProperties": False})
    stream = await made(engine, job_of(ASK, tools=[other, WEATHER], tool_choice="required", tool_name="get_weather"))
    assert [name for name, _ in stream.calls] == ["get_weather"]


async def test_a_tool_call_is_continued_at_any_token(engine: VllmEngine) -> None:
    job = job_of(ASK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    whole = await made(engine, job)
    assert engine.can_continue(job)
    for cut in range(1, len(whole.ids), 9):
        first = [step for step in whole.steps if step.tokens][:cut]
        rest = await made(engine, job, whole.ids[:cut])
        assert rest.end == "tool_calls"
        rest.steps[:0] = first
        assert rest.ids == whole.ids
        assert rest.calls == whole.calls


async def test_tools_that_may_be_called_and_are_not_leave_plain_text(engine: VllmEngine) -> None:
    stream = await made(engine, job_of(PARIS, tools=[WEATHER], max_tokens=12))
    assert "Paris" in stream.text
    assert stream.text == stream.data.decode()
    assert stream.calls == []
    without = await made(engine, job_of(PARIS, tools=[WEATHER], tool_choice="none"))
    assert "Paris" in without.data.decode()
    assert {step.text for step in without.steps} == {None}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"prompt": STORY, "tools": [WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_name": "other"}, "tool_choice"),
        ({"prompt": Chat([Message("assistant", "It")], is_open=True), "tools": [WEATHER]}, "messages"),
        ({"think": True}, "think"),
        ({"sampling": Sampling(typical_p=0.5)}, "typical_p"),
        ({"sampling": Sampling(repeat_penalty=1.2, repeat_last_n=64)}, "repeat_last_n"),
        ({"logprobs": 21}, "top_logprobs"),
        ({"sampling": Sampling(logit_bias={49_152: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(min_p=2.0)}, "min_p"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(engine: VllmEngine, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        await engine.encode(job_of(**fields))
    assert raised.value.param == param


async def test_sampling_values_that_change_nothing_are_accepted(engine: VllmEngine) -> None:
    sampling = Sampling(temperature=0, typical_p=1.0, repeat_penalty=1.0, repeat_last_n=64, top_k=0)
    assert b"Paris" in (await made(engine, job_of(sampling=sampling))).data


async def test_eos_is_made_like_any_token_if_it_shall_be_ignored(engine: VllmEngine) -> None:
    stream = await made(engine, job_of(max_tokens=20, ignore_eos=True))
    assert (len(stream.ids), stream.end) == (20, "limit")
    assert any(token.is_special for token in stream.tokens)


async def test_a_prompt_that_was_read_before_needs_no_prefill(engine: VllmEngine) -> None:
    prompt = Tokens([700 + i for i in range(100)])
    first, second = [await made(engine, job_of(prompt, max_tokens=2)) for _ in range(2)]
    assert [step.cached_tokens for step in first.steps] == [0, 0]
    assert [step.cached_tokens for step in second.steps] == [96, 0]


async def test_it_says_how_much_its_cache_and_a_step_hold(engine: VllmEngine) -> None:
    about = engine.capabilities
    assert about.kv_tokens >= about.context_tokens
    assert about.step_tokens > 0


async def test_questions_about_text_need_no_generation(engine: VllmEngine) -> None:
    async def data(kind: Any, prompt: Any) -> dict[str, Any]:
        return (await engine.answer(Job("", "m", prompt, kind=kind)))[0].data

    ids = (await data("tokenize", Text("Hi 😀")))["tokens"]
    assert b"".join((await data("tokenize", Text("Hi 😀")))["pieces"]).decode() == "Hi 😀"
    assert await data("detokenize", Tokens(ids)) == {"text": "Hi 😀"}
    assert (await data("render", PARIS))["text"].endswith("<|im_start|>assistant\n")
    assert await data("count", Text("Hi 😀")) == {"tokens": len(ids)}
    with pytest.raises(BadRequest):
        await data("embed", STORY)


async def test_what_is_not_loaded_says_so() -> None:
    from tests.weights.conftest import model_of

    model = model_of("vllm")
    engine = VllmEngine(model, "/nowhere")  # type: ignore[arg-type]
    with pytest.raises(EngineFailed):
        await engine.check_health()
    with pytest.raises(EngineFailed):
        engine.start(Generation(job_of(), [1], [], 1), lambda step: None, lambda error: None)
    await engine.close()
