"""Python `anthropic`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.clients.deployment import CALL, LONG, REAL, THOUGHT, WEATHER, Deployment, words

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}


@pytest.fixture
def client(world: Deployment) -> Iterator[Anthropic]:
    with Anthropic(base_url=world.url, api_key="none", max_retries=0) as client:
        yield client


def test_it_streams_what_it_says_whole(client: Anthropic) -> None:
    asked: Any = {"model": "scripted", "messages": HI, "max_tokens": 8}
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert whole.content[0].type == final.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text == words("hi", 8)
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == whole.usage.output_tokens == 8
    assert whole._request_id and f"msg_{whole._request_id}" == whole.id
    assert stream.request_id and f"msg_{stream.request_id}" == final.id


def test_it_thinks_calls_a_tool_and_goes_on_with_its_result(client: Anthropic) -> None:
    with client.messages.stream(model="caller", messages=HI, max_tokens=99, tools=[TOOL]) as stream:
        message = stream.get_final_message()
    thought, text, call = message.content
    assert thought.type == "thinking" and thought.thinking == THOUGHT
    assert text.type == "text" and text.text == "Let me look."
    assert call.type == "tool_use" and (call.name, call.input) == (CALL["name"], CALL["arguments"])
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns: Any = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="scripted", messages=turns, max_tokens=2, tools=[TOOL])
    assert answer.content[0].type == "text" and answer.content[0].text.count(" ") == 2


def test_leaving_its_stream_cancels(client: Anthropic, world: Deployment) -> None:
    with world.one_job("cancelled"), client.messages.stream(model="scripted", messages=HI, max_tokens=LONG) as stream:
        next(stream.text_stream)


def test_errors_before_and_in_the_stream(client: Anthropic, world: Deployment) -> None:
    with world.no_job(), pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", messages=HI, max_tokens=1)
    with world.no_job(), pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="scripted", messages=HI, max_tokens=0)
    said = ""
    with (
        pytest.raises(anthropic.APIStatusError, match="fail"),
        client.messages.stream(model="broken", messages=HI, max_tokens=99) as stream,
    ):
        for text in stream.text_stream:
            said += text
    assert said == "half an answer"


def test_a_real_model_counts_what_it_reads(client: Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "The capital of France is"}]
    counted = client.messages.count_tokens(model=REAL, messages=asked)
    answer = client.messages.create(model=REAL, messages=asked, max_tokens=24, extra_body={"temperature": 0})
    assert answer.content[0].type == "text" and "Paris" in answer.content[0].text
    read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    assert read == counted.input_tokens
