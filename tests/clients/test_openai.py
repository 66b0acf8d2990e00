"""Python `openai`: chat, completions, responses, embeddings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.clients.deployment import CALL, DIMENSIONS, LONG, REAL, THOUGHT, WEATHER, Deployment, words

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": WEATHER}
FLAT_TOOL: Any = {"type": "function", **WEATHER}


@pytest.fixture
def client(world: Deployment) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{world.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_streams_what_it_says_whole(client: OpenAI) -> None:
    asked: Any = {"model": "scripted", "messages": HI, "max_tokens": 8, "seed": 3}
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    whole = client.chat.completions.create(**asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == words("hi", 8, seed=3)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None and whole.usage.completion_tokens == 8


def test_chat_calls_a_tool_and_goes_on_with_its_result(client: OpenAI) -> None:
    with client.chat.completions.stream(model="caller", messages=HI, tools=[TOOL]) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Let me look."
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL["name"], CALL["arguments"])
    assert message.model_dump()["reasoning_content"] == THOUGHT
    turns = [*HI, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    answer = client.chat.completions.create(model="scripted", messages=turns, max_tokens=2, tools=[TOOL])
    assert answer.choices[0].message.content == words("hi", 2)


def test_chat_is_cancelled_by_leaving_its_stream(client: OpenAI, world: Deployment) -> None:
    asked = client.chat.completions.create
    with world.one_job("cancelled"), asked(model="scripted", messages=HI, max_tokens=LONG, stream=True) as stream:
        next(iter(stream))


def test_chat_gets_errors_before_and_in_its_stream(client: OpenAI, world: Deployment) -> None:
    with world.no_job(), pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="nobody", messages=HI)
    assert unknown.value.code == "model_not_found"
    with world.no_job(), pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="scripted", messages=HI, temperature=-1)
    assert wrong.value.param == "temperature"
    said = ""
    with pytest.raises(openai.APIError, match="fail") as failed:
        for chunk in client.chat.completions.create(model="broken", messages=HI, stream=True):
            said += chunk.choices[0].delta.content or ""
    assert (said, failed.value.code) == ("half an answer", "engine_error")


def test_chat_on_a_real_model(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "The capital of France is"}]
    with client.chat.completions.create(
        model=REAL, messages=asked, temperature=0, max_tokens=24, stream=True
    ) as chunks:
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_chat_on_a_real_model_calls_a_tool_that_it_must_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=REAL, messages=HI, tools=[TOOL], tool_choice="required", temperature=0, max_tokens=64
    )
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].model_dump()["function"]["name"] == "weather"


def test_completions_stream_and_are_refused(client: OpenAI) -> None:
    with client.completions.create(model="scripted", prompt="once", max_tokens=5, stream=True) as chunks:
        assert "".join(chunk.choices[0].text for chunk in chunks) == words("once", 5)
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="scripted", prompt="once", logprobs=6)
    assert refused.value.param == "logprobs"


def test_completions_are_cancelled_by_leaving(client: OpenAI, world: Deployment) -> None:
    asked = client.completions.create
    with world.one_job("cancelled"), asked(model="scripted", prompt="once", max_tokens=LONG, stream=True) as chunks:
        next(iter(chunks))


def test_responses_stream_and_go_on(client: OpenAI) -> None:
    with client.responses.stream(model="scripted", input="hi", max_output_tokens=6) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == words("hi", 6)
    first = client.responses.create(model="scripted", input="hi", max_output_tokens=6)
    assert first.output_text == text
    second = client.responses.create(model="scripted", input="more", previous_response_id=first.id, max_output_tokens=2)
    assert second.output_text == words("more", 2)
    assert second.usage is not None and first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_responses_call_a_tool_and_take_its_result(client: OpenAI) -> None:
    with client.responses.stream(model="caller", input="hi", tools=[FLAT_TOOL]) as stream:
        for _ in stream:
            pass
        made = stream.get_final_response()
    [call] = [item for item in made.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == (CALL["name"], CALL["arguments"])
    answer = client.responses.create(
        model="scripted",
        previous_response_id=made.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        tools=[FLAT_TOOL],
        max_output_tokens=2,
    )
    assert answer.output_text == words("hi", 2)


def test_responses_run_in_the_background_and_are_read_and_cancelled_on_the_other_pod(
    client: OpenAI, world: Deployment
) -> None:
    made = client.responses.create(model="scripted", input="hi", max_output_tokens=LONG, background=True)
    with OpenAI(base_url=f"{world.urls[1]}/v1", api_key="none", max_retries=0) as other:
        with other.responses.retrieve(made.id, stream=True, starting_after=4) as events:
            assert next(iter(events)).sequence_number == 5
        assert other.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_responses_are_cancelled_by_leaving(client: OpenAI, world: Deployment) -> None:
    asked = client.responses.create
    with world.one_job("cancelled"), asked(model="scripted", input="hi", max_output_tokens=LONG, stream=True) as events:
        next(iter(events))


def test_responses_get_errors(client: OpenAI, world: Deployment) -> None:
    with world.no_job(), pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input="hi")
    with client.responses.create(model="broken", input="hi", stream=True) as events:
        last = list(events)[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None and last.response.error.message


def test_embeddings_of_both_engines(client: OpenAI) -> None:
    made = client.embeddings.create(model="scripted", input=["one", "two"])
    assert [len(each.embedding) for each in made.data] == [DIMENSIONS] * 2
    real = client.embeddings.create(model=REAL, input=["a dog barks", "a puppy barks", "interest rates rose"])
    dog, puppy, rates = (each.embedding for each in real.data)
    assert _cosine(dog, puppy) > _cosine(dog, rates)
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="scripted", input=[])
    assert refused.value.param == "input"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [REAL, "scripted", "caller", "broken"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def _cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))  # both are of length 1
