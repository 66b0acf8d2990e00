"""Python `huggingface_hub`: its `InferenceClient`, on TGI's routes. TGI's have no tools; its chat is OpenAI's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, ValidationError

from tests.clients.deployment import CALL, LONG, WEATHER, Deployment, words

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(world: Deployment) -> Iterator[InferenceClient]:
    with InferenceClient(model=f"{world.url}/?model=scripted") as client:
        yield client


@pytest.fixture
def chat(world: Deployment) -> Iterator[InferenceClient]:
    with InferenceClient(model=world.url) as client:
        yield client


def test_it_streams_what_it_says_whole(client: InferenceClient) -> None:
    parts = list(client.text_generation("once", max_new_tokens=8, stream=True, details=True))
    whole = client.text_generation("once", max_new_tokens=8, details=True)
    assert client.text_generation("once", max_new_tokens=8) == whole.generated_text == words("once", 8)
    assert "".join(part.token.text for part in parts if not part.token.special) == words("once", 8)
    assert parts[-1].generated_text == words("once", 8)
    assert parts[-1].details is not None and whole.details is not None
    assert parts[-1].details.finish_reason == whole.details.finish_reason == "length"
    assert parts[-1].details.generated_tokens == whole.details.generated_tokens == 8


def test_its_chat_streams_calls_a_tool_and_gets_errors(chat: InferenceClient) -> None:
    chunks = chat.chat_completion(HI, model="scripted", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == words("hi", 8)
    tool: Any = {"type": "function", "function": WEATHER}
    answer = chat.chat_completion(HI, model="caller", tools=[tool])
    assert answer.choices[0].message.tool_calls is not None
    assert answer.choices[0].message.tool_calls[0].function.name == CALL["name"]
    with pytest.raises(HfHubHTTPError, match="404"):
        chat.chat_completion(HI, model="nobody")


def test_leaving_its_stream_cancels(world: Deployment) -> None:
    with world.one_job("cancelled"), InferenceClient(model=f"{world.url}/?model=scripted") as client:
        next(iter(client.text_generation("once", max_new_tokens=LONG, stream=True)))


def test_errors_before_and_in_the_stream(client: InferenceClient, world: Deployment) -> None:
    with world.no_job(), pytest.raises(ValidationError, match="best_of"):
        client.text_generation("once", best_of=2)
    with InferenceClient(model=f"{world.url}/?model=broken") as broken:
        said = ""
        with pytest.raises(GenerationError, match="fail"):
            for token in broken.text_generation("once", stream=True):
                said += token
        assert said == "half an answer"
        with pytest.raises(GenerationError, match="fail"):
            broken.text_generation("once")
