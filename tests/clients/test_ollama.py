"""Python `ollama`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest
from ollama import Client

from tests.clients.deployment import CALL, DIMENSIONS, LONG, REAL, THOUGHT, WEATHER, Deployment, words

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": WEATHER}


@pytest.fixture
def client(world: Deployment) -> Iterator[Client]:
    with Client(host=world.url) as client:
        yield client


def test_chat_and_generate_stream_what_they_say_whole(client: Client) -> None:
    options = {"num_predict": 8}
    parts = list(client.chat(model="scripted", messages=HI, options=options, stream=True))
    whole = client.chat(model="scripted", messages=HI, options=options)
    assert "".join(part.message.content or "" for part in parts) == whole.message.content == words("hi", 8)
    assert parts[-1].done_reason == whole.done_reason == "length"
    assert parts[-1].eval_count == whole.eval_count == 8
    pieces = list(client.generate(model="scripted", prompt="once", options=options, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == words("once", 8)
    assert client.generate(model="scripted", prompt="once", options=options).response == words("once", 8)


def test_it_thinks_calls_a_tool_and_goes_on_with_its_result(client: Client) -> None:
    parts = list(client.chat(model="caller", messages=HI, tools=[TOOL], think=True, stream=True))
    assert "".join(part.message.thinking or "" for part in parts) == THOUGHT
    assert "".join(part.message.content or "" for part in parts) == "Let me look."
    [call] = [call for part in parts for call in part.message.tool_calls or []]
    assert (call.function.name, call.function.arguments) == (CALL["name"], CALL["arguments"])
    turns = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "weather", "content": "rain"},
    ]
    answer = client.chat(model="scripted", messages=turns, tools=[TOOL], options={"num_predict": 2})
    assert answer.message.content == words("hi", 2)


def test_leaving_its_stream_cancels(client: Client, world: Deployment) -> None:
    with world.one_job("cancelled"):
        parts: Any = client.chat(model="scripted", messages=HI, options={"num_predict": LONG}, stream=True)
        next(parts)
        parts.close()


def test_errors_before_and_in_the_stream(client: Client, world: Deployment) -> None:
    with world.no_job(), pytest.raises(ollama.ResponseError) as unknown:
        client.chat(model="nobody", messages=HI)
    assert unknown.value.status_code == 404
    with world.no_job(), pytest.raises(ollama.ResponseError, match="temperature") as wrong:
        client.generate(model="scripted", prompt="hi", options={"temperature": -1})
    assert wrong.value.status_code == 400
    said = ""
    with pytest.raises(ollama.ResponseError, match="fail"):
        for part in client.chat(model="broken", messages=HI, stream=True):
            said += part.message.content or ""
    assert said == "half an answer"


def test_embeddings_of_both_engines(client: Client) -> None:
    made = client.embed(model="scripted", input=["one", "two"])
    assert [len(each) for each in made.embeddings] == [DIMENSIONS] * 2
    assert len(client.embed(model=REAL, input="one").embeddings[0]) == len(client.embeddings(REAL, "one").embedding)


def test_what_there_is(client: Client) -> None:
    names = [f"{REAL}:latest", "scripted:latest", "caller:latest", "broken:latest"]
    assert [model.model for model in client.list().models] == names
    assert sorted(str(model.model) for model in client.ps().models) == sorted(names)
    assert "completion" in (client.show("scripted").capabilities or [])
    with pytest.raises(ollama.ResponseError):
        client.pull("scripted")


def test_a_real_model(client: Client) -> None:
    asked: Any = [{"role": "user", "content": "The capital of France is"}]
    parts = client.chat(model=REAL, messages=asked, options={"temperature": 0, "num_predict": 24}, stream=True)
    assert "Paris" in "".join(part.message.content or "" for part in parts)
