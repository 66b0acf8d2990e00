"""Chat, models and completions, as the official client meets what is newer than plain text in them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import NOT_GIVEN
from pydantic import BaseModel

from headrace.broker.messages import (
    Chat,
    Delta,
    Finished,
    JsonSchema,
    Message,
    Text,
    Tool,
    ToolCall,
    ToolCallDelta,
)
from headrace.broker.models import ScriptedCall, ScriptedPart
from tests.api.by_hand import HandWorker
from tests.api.conftest import Deploy
from tests.api.test_responses_client import client_of

TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}},
]
ASKED: Any = [{"role": "user", "content": "Bern?"}]
CALLS = (
    Delta(0, "", [1], reasoning="I wonder"),
    Delta(0, "", [2], tool_calls=[ToolCallDelta(0, "call_a", "weather", '{"place":')]),
    [
        Delta(0, "", [3], tool_calls=[ToolCallDelta(0, arguments='"Bern"}')]),
        Delta(0, "", [4], tool_calls=[ToolCallDelta(1, "call_b", "weather", "{}")]),
    ],
    Finished(0, "tool_calls"),
)


class Weather(BaseModel):
    """What the client is to parse an answer as."""

    rain: bool


async def test_tools_streamed_and_whole_are_the_same_and_are_answered(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        asked = client.chat.completions.create(
            model="scripted", messages=ASKED, tools=TOOLS, tool_choice="required", parallel_tool_calls=True
        )
        whole, job = await asyncio.gather(asked, worker.answer(*CALLS))
        assert job.tools == [Tool("weather", "d", {"type": "object"})]
        assert (job.tool_choice, job.parallel_tool_calls) == ("required", True)
        work = asyncio.create_task(worker.answer(*CALLS))
        async with client.chat.completions.stream(model="scripted", messages=ASKED, tools=TOOLS) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
        await work
        assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
        message = whole.choices[0].message
        calls = [call.to_dict() for call in message.tool_calls or []]
        assert [call["id"] for call in calls] == ["call_a", "call_b"]
        again = [call.to_dict() for call in streamed.choices[0].message.tool_calls or []]
        for call in again:
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)  # type: ignore[attr-defined]
        assert again == calls
        assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
        assert message.to_dict()["reasoning_content"] == "I wonder"
        answers: Any = [{"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls]
        turns: Any = [*ASKED, message.to_dict(), *answers]
        asked = client.chat.completions.create(model="scripted", messages=turns, tools=TOOLS)
        last, job = await asyncio.gather(asked, worker.answer(Delta(0, "It rains.", [1]), Finished(0, "stop")))
        assert last.choices[0].message.content == "It rains."
        made = [ToolCall("call_a", "weather", '{"place":"Bern"}'), ToolCall("call_b", "weather", "{}")]
        assert isinstance(job.prompt, Chat)
        assert job.prompt.messages[1:] == [
            Message("assistant", "", made, reasoning="I wonder"),
            Message("tool", "rain", tool_call_id="call_a", name="weather"),
            Message("tool", "rain", tool_call_id="call_b", name="weather"),
        ]


async def test_an_answer_is_parsed_by_a_schema_on_both_routes(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    said = (Delta(0, '{"rain":', [1]), Delta(0, "true}", [2]), Finished(0, "stop"))
    async with client_of(deployment) as client:
        chat = client.chat.completions.parse(model="scripted", messages=ASKED, response_format=Weather)
        answer, job = await asyncio.gather(chat, worker.answer(*said))
        assert answer.choices[0].message.parsed == Weather(rain=True)
        assert isinstance(job.constraint, JsonSchema) and job.constraint.schema["required"] == ["rain"]
        other = client.responses.parse(model="scripted", input="Bern?", text_format=Weather)
        response, job = await asyncio.gather(other, worker.answer(*said))
        assert response.output_parsed == Weather(rain=True)
        assert isinstance(job.constraint, JsonSchema) and job.constraint.schema["required"] == ["rain"]


async def test_extras_of_other_servers_reach_the_job_or_are_refused(deploy: Deploy) -> None:
    deployment = await deploy()
    async with client_of(deployment) as client:
        extra = {"top_k": 5, "chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.1}
        await client.chat.completions.create(
            model="scripted", messages=ASKED, max_tokens=1, reasoning_effort="none", extra_body=extra
        )
        job = deployment.recorded.told[-1].job
        assert (job.sampling.top_k, job.sampling.min_p, job.think) == (5, 0.1, False)
        for name, value in (("guided_choice", ["a"]), ("min_tokens", 3), ("stop_token_ids", [1])):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="scripted", messages=ASKED, extra_body={name: value})
            assert caught.value.param == name
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="scripted", messages=image)
        assert caught.value.param == "messages[0].content[0].type"
        assert len(deployment.recorded.told) == 1


async def test_a_last_message_of_the_assistant_reaches_the_engine_as_unfinished(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        turns: Any = [*ASKED, {"role": "assistant", "content": "It"}]
        asked = client.chat.completions.create(model="scripted", messages=turns)
        answer, job = await asyncio.gather(asked, worker.answer(Delta(0, " rains.", [1]), Finished(0, "stop")))
        assert answer.choices[0].message.content == " rains."
        assert isinstance(job.prompt, Chat) and job.prompt.is_open


async def test_completions_echo_and_suffix(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    said = (Delta(0, "b", [1]), Delta(1, "c", [1]), Finished(0, "stop"), Finished(1, "stop"))
    async with client_of(deployment) as client:
        asked = client.completions.create(model="scripted", prompt="a", echo=True, n=2, suffix="z")
        answer, job = await asyncio.gather(asked, worker.answer(*said))
        assert [choice.text for choice in answer.choices] == ["ab", "ac"]
        assert (job.prompt, job.suffix) == (Text("a"), "z")
        work = asyncio.create_task(worker.answer(*said))
        texts = ["", ""]
        async for chunk in await client.completions.create(model="scripted", prompt="a", echo=True, n=2, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        await work
        assert texts == ["ab", "ac"]


async def test_models_are_listed_and_found(deploy: Deploy) -> None:
    deployment = await deploy({"name": "org/scripted:8b", "context_tokens": 99})
    async with client_of(deployment) as client:
        [listed] = [model async for model in client.models.list()]
        assert listed.id == "org/scripted:8b" and listed.to_dict()["max_model_len"] == 99
        assert await client.models.retrieve("org/scripted:8b") == listed
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("other")
        assert caught.value.code == "model_not_found"


async def test_usage_comes_last_and_counts_thoughts(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        for include in (True, False):
            work = asyncio.create_task(worker.answer(*CALLS))
            options: Any = {"include_usage": True} if include else NOT_GIVEN
            stream = await client.chat.completions.create(
                model="scripted", messages=ASKED, stream=True, stream_options=options
            )
            usages = [chunk.usage async for chunk in stream]
            await work
            assert not any(usages[:-1])
            last = usages[-1]
            assert (last is not None) is include
            if last is not None:
                details = json.loads(last.to_json())["completion_tokens_details"]
                assert (last.completion_tokens, details) == (3, {"reasoning_tokens": 1})


async def test_what_an_engine_parses_is_the_same_on_both_routes_streamed_and_whole(deploy: Deploy) -> None:
    call = ScriptedPart(tool_call=ScriptedCall("weather", {"place": "Bern"}))
    deployment = await deploy({"script": [ScriptedPart(reasoning="I wonder"), "Let me see.", call]})
    async with client_of(deployment) as client:
        whole = await client.chat.completions.create(model="scripted", messages=ASKED, tools=TOOLS)
        async with client.chat.completions.stream(model="scripted", messages=ASKED, tools=TOOLS) as stream:
            streamed = await stream.get_final_completion()
        flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
        response = await client.responses.create(model="scripted", input=ASKED, tools=flat)
        async with client.responses.stream(model="scripted", input=ASKED, tools=flat) as events:
            final = await events.get_final_response()
        for message in (whole.choices[0].message, streamed.choices[0].message):
            [made] = message.tool_calls or []
            assert made.type == "function" and made.function.name == "weather"
            assert json.loads(made.function.arguments) == {"place": "Bern"}
            assert (message.content, message.to_dict()["reasoning_content"]) == ("Let me see.", "I wonder")
        assert whole.choices[0].finish_reason == streamed.choices[0].finish_reason == "tool_calls"
        for each in (response, final):
            reasoning, text, called = (item.to_dict() for item in each.output)
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "I wonder"}]
            assert (each.output_text, text["status"], called["name"]) == ("Let me see.", "completed", "weather")
            assert json.loads(str(called["arguments"])) == {"place": "Bern"}
