"""`langchain-openai`, as an application has it: messages, bound tools, structured output, events."""

from __future__ import annotations

import os
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.deployment import CALL, DIMENSIONS, LONG, WEATHER, Deployment, words

if not os.environ.get("CI"):
    pytest.importorskip("langchain_openai", reason="run `make clients`")

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


class Weather(BaseModel):
    """How the weather is somewhere."""

    place: str


def model(world: Deployment, name: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=f"{world.url}/v1", api_key="none", max_retries=0, **fields)


def test_it_streams_what_it_says_whole(world: Deployment) -> None:
    chat = model(world, "scripted", max_tokens=8, stream_usage=True)
    parts = list(chat.stream("hi"))
    whole = chat.invoke("hi")
    assert "".join(part.text for part in parts) == whole.text == words("hi", 8)
    used = [part.usage_metadata for part in parts if part.usage_metadata]
    assert used == [whole.usage_metadata]
    assert whole.response_metadata["finish_reason"] == "length"


def test_it_calls_a_tool_and_goes_on_with_its_result(world: Deployment) -> None:
    bound = model(world, "caller").bind_tools([{"type": "function", "function": WEATHER}])
    parts = list(bound.stream("hi"))
    said = parts[0]
    for part in parts[1:]:
        said += part
    [call] = said.tool_calls
    assert (call["name"], call["args"]) == (CALL["name"], CALL["arguments"])
    turns = [HumanMessage("hi"), said, ToolMessage("rain", tool_call_id=call["id"])]
    assert model(world, "scripted", max_tokens=2).invoke(turns).text == words("hi", 2)


def test_structured_output_is_what_was_asked_for(world: Deployment) -> None:
    for method in ("json_schema", "function_calling"):
        answer = model(world, "scripted").with_structured_output(Weather, method=method).invoke("hi")
        assert isinstance(answer, Weather) and len(answer.place) == 8


def test_leaving_its_stream_cancels(world: Deployment) -> None:
    with world.one_job("cancelled"):
        parts = model(world, "scripted", max_tokens=LONG).stream("hi")
        next(parts)
        parts.close()


def test_errors_before_and_in_the_stream(world: Deployment) -> None:
    with world.no_job(), pytest.raises(openai.NotFoundError):
        model(world, "nobody").invoke("hi")
    said = ""
    with pytest.raises(openai.APIError, match="fail"):
        for part in model(world, "broken").stream("hi"):
            said += part.text
    assert said == "half an answer"


def test_embeddings(world: Deployment) -> None:
    made = OpenAIEmbeddings(
        model="scripted", base_url=f"{world.url}/v1", api_key="none", check_embedding_ctx_length=False
    ).embed_documents(["one", "two"])
    assert [len(each) for each in made] == [DIMENSIONS] * 2
