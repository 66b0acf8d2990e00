"""Responses, as the official client meets them on real pods."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall, ResponseReasoningItem

from headrace.broker.messages import Chat, Delta, Finished, Message, Tool, ToolCall, ToolCallDelta
from headrace.broker.settings import KeySettings
from tests.api.by_hand import HandWorker
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "how it is there",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    "strict": True,
}
CALLS = (
    Delta(0, "", [1], reasoning="I wonder"),
    Delta(0, "Let me look.", [2]),
    Delta(0, "", [3], tool_calls=[ToolCallDelta(0, "call_a", "weather", '{"place":')]),
    Delta(0, "", [4], tool_calls=[ToolCallDelta(0, arguments='"Bern"}')]),
    Delta(0, "", [5], tool_calls=[ToolCallDelta(1, "call_b", "weather", "{}")]),
    Finished(0, "tool_calls"),
)


@contextlib.asynccontextmanager
async def client_of(deployment: Deployment, pod: int = 0, key: str = "x") -> AsyncIterator[AsyncOpenAI]:
    """A client that tries everything once."""
    url = deployment.pods[pod].url + "/v1"
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=20) as client:
        yield client


def messages_told(deployment: Deployment) -> list[Message]:
    """The conversation that the engine was given last."""
    prompt = deployment.recorded.told[-1].job.prompt
    assert isinstance(prompt, Chat)
    return prompt.messages


async def test_a_stream_ends_in_what_the_response_in_one_piece_is(deploy: Deploy) -> None:
    deployment = await deploy()
    async with client_of(deployment) as client:
        made = await client.responses.create(model="scripted", input="hi", max_output_tokens=3, metadata={"a": "b"})
        async with client.responses.stream(model="scripted", input="hi", max_output_tokens=3) as stream:
            events = [event async for event in stream]
        last = events[-1]
        assert last.type == "response.incomplete"
        streamed = last.response
        async with client.responses.stream(model="scripted", input="hi") as stream:
            final = await stream.get_final_response()
    assert (final.status, len(final.output_text)) == ("completed", 64 * 9)
    assert made.output_text == streamed.output_text != ""
    assert (made.status, streamed.status) == ("incomplete", "incomplete")
    assert made.incomplete_details is not None and made.incomplete_details.reason == "max_output_tokens"
    assert made.usage == streamed.usage
    assert made.usage is not None and made.usage.output_tokens == 3
    assert made.metadata == {"a": "b"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if "delta" not in event.type] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]


async def test_a_conversation_goes_on_on_any_pod_and_instructions_are_those_of_the_last_request(
    deploy: Deploy,
) -> None:
    deployment = await deploy(pods=2)
    async with client_of(deployment) as one, client_of(deployment, 1) as two:
        first = await one.responses.create(model="scripted", input="a", instructions="be 1", max_output_tokens=2)
        second = await two.responses.create(
            model="scripted", input="b", instructions="be 2", previous_response_id=first.id, max_output_tokens=2
        )
        assert messages_told(deployment) == [
            Message("system", "be 2"),
            Message("user", "a"),
            Message("assistant", first.output_text),
            Message("user", "b"),
        ]
        third = await one.responses.create(
            model="scripted", input=[{"role": "user", "content": "c"}], previous_response_id=second.id
        )
        assert [each.content for each in messages_told(deployment)] == [
            "a",
            first.output_text,
            "b",
            second.output_text,
            "c",
        ]
        assert third.previous_response_id == second.id
        items = await two.responses.input_items.list(second.id, order="asc")
        shown = [item.to_dict() for item in items.data]
        roles = [(each["role"], each["content"][0]["text"]) for each in shown]  # type: ignore[index]
        assert roles == [("user", "a"), ("assistant", first.output_text), ("user", "b")]
        page = await two.responses.input_items.list(second.id, limit=1)
        assert (page.data[0].to_dict(), page.has_more) == (shown[-1], True)
        rest = await two.responses.input_items.list(second.id, after=str(shown[-1]["id"]), limit=9)
        assert [item.to_dict() for item in rest.data] == shown[1::-1]


async def test_calls_are_made_and_answered(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        call = client.responses.create(model="scripted", input="Bern?", tools=[WEATHER], tool_choice="required")
        made, job = await asyncio.gather(call, worker.answer(*CALLS))
        assert (job.tools, job.tool_choice) == (
            [Tool("weather", "how it is there", WEATHER["parameters"])],
            "required",
        )
        reasoning, message, first, second = made.output
        assert isinstance(reasoning, ResponseReasoningItem) and reasoning.content is not None
        assert reasoning.content[0].text == "I wonder"
        assert made.output_text == "Let me look." and message.type == "message"
        assert isinstance(first, ResponseFunctionToolCall) and isinstance(second, ResponseFunctionToolCall)
        assert (first.call_id, first.name, first.arguments) == ("call_a", "weather", '{"place":"Bern"}')
        assert (second.call_id, second.arguments) == ("call_b", "{}")
        assert made.status == "completed"
        assert made.usage is not None and made.usage.output_tokens_details.reasoning_tokens == 1
        answers: Any = [
            {"type": "function_call_output", "call_id": "call_a", "output": "rain"},
            {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "sun"}]},
        ]
        asked = client.responses.create(model="scripted", input=answers, previous_response_id=made.id)
        _, job = await asyncio.gather(asked, worker.answer(Delta(0, "It rains.", [1]), Finished(0, "stop")))
        calls = [ToolCall("call_a", "weather", '{"place":"Bern"}'), ToolCall("call_b", "weather", "{}")]
        assert job.prompt == Chat(
            [
                Message("user", "Bern?"),
                Message("assistant", "Let me look.", calls, reasoning="I wonder"),
                Message("tool", "rain", tool_call_id="call_a", name="weather"),
                Message("tool", "sun", tool_call_id="call_b", name="weather"),
            ]
        )


async def test_calls_are_streamed_piece_by_piece(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        work = asyncio.create_task(worker.answer(*CALLS))
        async with client.responses.stream(model="scripted", input="Bern?", tools=[WEATHER]) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        await work
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert [(delta.output_index, delta.delta) for delta in deltas] == [(2, '{"place":'), (2, '"Bern"}'), (3, "{}")]
        assert [e.arguments for e in events if e.type == "response.function_call_arguments.done"] == [
            '{"place":"Bern"}',
            "{}",
        ]
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "I wonder"
        found = await client.responses.retrieve(final.id)
        assert [item.to_dict() for item in found.output] == [_without_parsed(item.to_dict()) for item in final.output]


def _without_parsed(item: dict[str, Any]) -> dict[str, Any]:
    """An item without what the client's stream helper adds to it."""
    content = item.get("content")
    if isinstance(content, list):
        content = [{key: value for key, value in part.items() if key != "parsed"} for part in content]
    shown = {key: value for key, value in item.items() if key not in ("parsed_arguments", "content")}
    return shown if content is None else {**shown, "content": content}


async def test_a_background_response_is_followed_from_any_number_on_any_pod(deploy: Deploy) -> None:
    deployment = await deploy({"tokens_per_s": 0.0}, pods=2, workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as one, client_of(deployment, 1) as two:
        made = await one.responses.create(model="scripted", input="hi", background=True)
        assert (made.status, made.background, made.output) == ("queued", True, [])
        assert (await two.responses.retrieve(made.id)).status == "queued"
        await worker.claim()
        await worker.write(Delta(0, "A", [1]), Delta(0, "B", [2]))
        halfway = await two.responses.retrieve(made.id)
        assert (halfway.status, halfway.output_text) == ("in_progress", "AB")
        stream = await two.responses.retrieve(made.id, stream=True, starting_after=4)
        first = await anext(stream)
        assert (first.type, first.sequence_number) == ("response.output_text.delta", 5)
        await worker.write(Finished(0, "stop"))
        await worker.end()
        rest = [first, *[event async for event in stream]]
        whole = [event async for event in await one.responses.retrieve(made.id, stream=True)]
        assert rest == whole[5:]
        assert [event.sequence_number for event in whole] == list(range(len(whole)))
        assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
        assert (await two.responses.retrieve(made.id)).status == "completed"
        for after in range(len(whole)):
            again = [event async for event in await two.responses.retrieve(made.id, stream=True, starting_after=after)]
            assert again == whole[after + 1 :]
        async with two.responses.stream(response_id=made.id, starting_after=4) as helper:
            assert [event.sequence_number async for event in helper] == list(range(5, len(whole)))
            assert (await helper.get_final_response()).output_text == "AB"
        with pytest.raises(openai.BadRequestError) as caught:
            await two.responses.retrieve(made.id, stream=True, starting_after=len(whole))
        assert caught.value.code == "invalid_position"


async def test_a_background_stream_goes_on_without_its_client(deploy: Deploy) -> None:
    deployment = await deploy({"tokens_per_s": 200.0}, queue={"reader_lease_s": 0.2}, api={"grace_s": 0})
    async with client_of(deployment) as client:
        stream = await client.responses.create(
            model="scripted", input="hi", background=True, stream=True, max_output_tokens=60
        )
        created = await anext(stream)
        assert created.type == "response.created"
        await stream.close()

        async def is_complete() -> bool:
            return (await client.responses.retrieve(created.response.id)).status == "incomplete"

        await eventually(is_complete)
        found = await client.responses.retrieve(created.response.id)
        assert found.usage is not None and found.usage.output_tokens == 60


async def test_a_response_is_cancelled_once_and_stays_so(deploy: Deploy) -> None:
    deployment = await deploy({"tokens_per_s": 20.0})
    async with client_of(deployment) as client:
        made = await client.responses.create(model="scripted", input="hi", background=True, max_output_tokens=10_000)
        await eventually(lambda: deployment.recorded.tokens > 2)
        cancelled = await client.responses.cancel(made.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output_text != ""
        assert (await client.responses.cancel(made.id)).status == "cancelled"
        await eventually(deployment.is_idle)
        events = [event async for event in await client.responses.retrieve(made.id, stream=True)]
        assert events[-1].type == "response.failed"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="scripted", input="x", previous_response_id=made.id)
        assert caught.value.param == "previous_response_id"


async def test_a_deleted_response_is_not_there(deploy: Deploy) -> None:
    deployment = await deploy()
    async with client_of(deployment) as client:
        made = await client.responses.create(model="scripted", input="hi")
        await client.responses.delete(made.id)
        for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="scripted", input="x", previous_response_id=made.id)
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    [waiting] = [await deployment.broker.status(made.id.removeprefix("resp_"))]
    assert waiting is None


async def test_what_is_not_stored_is_found_by_nobody(deploy: Deploy) -> None:
    deployment = await deploy()
    async with client_of(deployment) as client:
        made = await client.responses.create(model="scripted", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="scripted", input="x", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        chat = await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(chat.id.replace("chatcmpl-", "resp_"))
        for wrong in ("resp_x", "x", "resp_" + "0" * 32, "resp_" + "f" * 32):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(wrong)


async def test_a_response_of_somebody_else_is_not_there(deploy: Deploy) -> None:
    keys = [KeySettings(owner=name, sha256=hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob")]
    deployment = await deploy(keys=keys)
    async with client_of(deployment, key="ann") as ann, client_of(deployment, key="bob") as bob:
        made = await ann.responses.create(model="scripted", input="hi")
        for ask in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.BadRequestError):
            await bob.responses.create(model="scripted", input="x", previous_response_id=made.id)
        assert (await ann.responses.retrieve(made.id)).id == made.id


async def test_going_on_from_what_has_not_ended_is_refused_and_enqueues_nothing(deploy: Deploy) -> None:
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        made = await client.responses.create(model="scripted", input="hi", background=True)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="scripted", input="x", previous_response_id=made.id)
        assert "queued" in caught.value.message
        assert caught.value.response.headers.get("x-request-id") is None
        stats = await deployment.broker.stats("scripted")
        assert sum(stats.waiting.values()) == 1
        await client.responses.delete(made.id)
        assert await deployment.is_idle()


async def test_a_background_request_with_an_idempotency_key_is_one_job(deploy: Deploy) -> None:
    deployment = await deploy()
    async with client_of(deployment) as client:
        headers = {"idempotency-key": "k"}
        one = await client.responses.create(model="scripted", input="hi", background=True, extra_headers=headers)
        two = await client.responses.with_raw_response.create(
            model="scripted", input="hi", background=True, extra_headers=headers
        )
        assert two.parse().id == one.id
        assert two.headers["x-idempotent-replay"] == "true"
        await eventually(deployment.is_idle)
        assert len(deployment.recorded.told) == 1


async def test_a_failure_is_told_in_the_stream_and_kept(deploy: Deploy) -> None:
    deployment = await deploy({"script": ["a", "b"], "script_end": "error"})
    async with client_of(deployment) as client:
        events = [event async for event in await client.responses.create(model="scripted", input="hi", stream=True)]
        last = events[-1]
        assert last.type == "response.failed" and last.response.error is not None
        assert last.response.error.to_dict()["code"] == "engine_error"
        assert (await client.responses.retrieve(last.response.id)).status == "failed"
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model="scripted", input="hi")
