"""`litellm` as a client, of four of our formats: what it says must be the same in each."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.clients.deployment import CALL, DIMENSIONS, LONG, WEATHER, Deployment, words

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else importing it looks for prices on the network
if not os.environ.get("CI"):
    pytest.importorskip("litellm", reason="run `make clients`")

import litellm  # after what it reads
from litellm.exceptions import MidStreamFallbackError

pytestmark = pytest.mark.filterwarnings("ignore")  # of its own making, on many paths

HI: Any = [{"role": "user", "content": "hi"}]
TOOL: Any = {"type": "function", "function": WEATHER}
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": "", "ollama_chat": ""}
FAILURES = dict.fromkeys(PROVIDERS, MidStreamFallbackError) | {"ollama_chat": litellm.BadRequestError}
"""What it makes of an error in a stream; of Ollama's form it knows only that it is not what it waited for."""
providers = pytest.mark.parametrize("provider", PROVIDERS)


def ask(world: Deployment, provider: str, model: str, **fields: Any) -> Any:
    return litellm.completion(
        f"{provider}/{model}", HI, api_base=world.url + PROVIDERS[provider], api_key="none", max_retries=0, **fields
    )


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@providers
def test_it_streams_what_it_says_whole(world: Deployment, provider: str) -> None:
    whole = ask(world, provider, "scripted", max_tokens=8)
    assert text_of(ask(world, provider, "scripted", max_tokens=8, stream=True)) == words("hi", 8)
    assert whole.choices[0].message.content == words("hi", 8)
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 8)


@providers
def test_it_calls_a_tool(world: Deployment, provider: str) -> None:
    chunks = list(ask(world, provider, "caller", max_tokens=99, tools=[TOOL], stream=True))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    assert message.content == "Let me look."
    [call] = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (CALL["name"], CALL["arguments"])


@providers
def test_leaving_its_stream_cancels(world: Deployment, provider: str) -> None:
    with world.one_job("cancelled"):
        chunks = ask(world, provider, "scripted", max_tokens=LONG, stream=True)
        next(chunks)
        chunks.completion_stream.close()


@providers
def test_errors_before_and_in_the_stream(world: Deployment, provider: str) -> None:
    with world.no_job(), pytest.raises(litellm.NotFoundError, match="nobody"):
        ask(world, provider, "nobody", max_tokens=1)
    said = ""
    with pytest.raises(FAILURES[provider], match="was told to fail"):
        for chunk in ask(world, provider, "broken", max_tokens=99, stream=True):
            said += chunk.choices[0].delta.content or ""
    assert said == "half an answer"


def test_embeddings(world: Deployment) -> None:
    made = litellm.embedding("openai/scripted", ["one", "two"], api_base=f"{world.url}/v1", api_key="none")
    assert [len(each["embedding"]) for each in made.data] == [DIMENSIONS] * 2
