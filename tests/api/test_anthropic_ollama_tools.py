"""Anthropic's and Ollama's routes with what a model says besides text, and jobs of other kinds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from headrace.broker.messages import Chat, Message, ToolCall
from headrace.broker.models import ScriptedCall, ScriptedPart
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment
from tests.api.spoken import CHAT, HI, MESSAGES, Spoken, assert_continues

SCRIPT = [
    ScriptedPart(reasoning="r1"),
    ScriptedPart(reasoning=" r2"),
    "I look.",
    ScriptedPart(tool_call=ScriptedCall("f", {"a": 1})),
    ScriptedPart(tool_call=ScriptedCall("g", {})),
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "anthropic.messages": [{"name": name, "input_schema": SCHEMA} for name in ("f", "g")],
    "ollama.chat": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")],
}
both = pytest.mark.parametrize("form", [MESSAGES, CHAT], ids=[MESSAGES.name, CHAT.name])


async def ask(up: Deployment, form: Spoken, pod: int = 0, **fields: Any) -> Answer:
    body = form.asking(**{"tools": TOOLS[form.name], "stream": False, **fields})
    answer = await up.ask("POST", form.path, pod, json=body)
    assert answer.status == 200, answer.body
    return answer


async def test_c1_c3_blocks_of_a_message(deploy: Deploy) -> None:
    up = await deploy({"script": SCRIPT})
    body = (await ask(up, MESSAGES)).json
    thinking, text, first, second = body["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "r1 r2", "I look.")
    assert [(call["name"], call["input"]) for call in (first, second)] == [("f", {"a": 1}), ("g", {})]
    assert len({first["id"], second["id"]}) == 2 and body["stop_reason"] == "tool_use"
    frames = [frame.said for frame in MESSAGES.read((await ask(up, MESSAGES, stream=True)).body)]
    begun = [frame["content_block"] for frame in frames if frame["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use", "tool_use"]
    pieces = [
        frame["delta"].get("partial_json", "") for frame in frames if frame.get("index") == 2 and "delta" in frame
    ]
    assert json.loads("".join(pieces)) == {"a": 1}
    assert MESSAGES.of_stream(frames) == MESSAGES.of_whole(body)
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "5"} for call in (first, second)]
    turns = [*HI, {"role": "assistant", "content": body["content"]}, {"role": "user", "content": results}]
    await ask(up, MESSAGES, messages=turns)
    calls = [ToolCall(first["id"], "f", '{"a":1}'), ToolCall(second["id"], "g", "{}")]
    assert up.recorded.told[-1].job.prompt == Chat(
        [
            Message("user", "hi"),
            Message("assistant", "I look.", calls, reasoning="r1 r2"),
            *(Message("tool", "5", tool_call_id=call.id, name=call.name) for call in calls),
        ]
    )


async def test_c1_c3_fields_of_a_chunk(deploy: Deploy) -> None:
    up = await deploy({"script": SCRIPT})
    body = (await ask(up, CHAT)).json
    message = body["message"]
    assert (message["content"], message["thinking"]) == ("I look.", "r1 r2")
    functions = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert functions == [("f", {"a": 1}), ("g", {})] and body["done_reason"] == "stop"
    frames = [frame.said for frame in CHAT.read((await ask(up, CHAT, stream=True)).body)]
    assert CHAT.of_stream(frames) == CHAT.of_whole(body)
    said = [frame["message"] for frame in frames]
    assert "".join(each.get("thinking", "") for each in said) == "r1 r2"
    assert [each["tool_calls"] for each in said if "tool_calls" in each] == [message["tool_calls"]]
    await ask(up, CHAT, messages=[*HI, message, {"role": "tool", "tool_name": "g", "content": "5"}])
    [_, assistant, result] = up.recorded.told[-1].job.prompt.messages  # type: ignore[union-attr]  # it is a Chat
    assert [call.id for call in assistant.tool_calls] == [call["id"] for call in message["tool_calls"]]
    assert result == Message("tool", "5", tool_call_id=assistant.tool_calls[1].id, name="g")


@both
async def test_e9_calls_and_thoughts_are_continued_exactly(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": SCRIPT, "tokens_per_s": 200.0}, pods=2)
    answer = await ask(up, form, stream=True)
    frames = form.read(answer.body)
    for index, frame in enumerate(frames):
        rest = await up.resume(answer.headers["x-request-id"], frame.id, pod=1)
        assert_continues(form, form.read(rest.body), frames[index + 1 :])


@both
async def test_an_answer_by_a_schema(deploy: Deploy, form: Spoken) -> None:
    up = await deploy()
    fields: dict[str, Any] = {"format": SCHEMA}
    if form is MESSAGES:
        fields = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    answer = await ask(up, form, **fields, tools=[])
    assert isinstance(json.loads(form.of_whole(answer.json).text)["a"], int)


async def test_a_tool_that_must_be_called(deploy: Deploy) -> None:
    up = await deploy()
    for choice in ({"type": "any"}, {"type": "tool", "name": "g"}):
        body = (await ask(up, MESSAGES, tool_choice=choice)).json
        [call] = body["content"]
        assert (call["type"], body["stop_reason"]) == ("tool_use", "tool_use") and isinstance(call["input"]["a"], int)
    assert call["name"] == "g"


async def test_tokens_are_counted_without_generating(deploy: Deploy) -> None:
    up = await deploy()
    body = {**MESSAGES.body, "system": "x" * 38}
    answer = await up.ask("POST", "/v1/messages/count_tokens", json=body)
    assert (answer.status, answer.json) == (200, {"input_tokens": 10})
    assert up.recorded.told == []
    wrong = await up.ask("POST", "/v1/messages/count_tokens", json={**body, "messages": []})
    assert wrong.status == 400 and "messages" in MESSAGES.error(wrong.json)


async def test_embeddings(deploy: Deploy) -> None:
    up = await deploy({"dimensions": 8})
    answer = await up.ask("POST", "/api/embed", json={"model": "scripted", "input": ["a", "b", "a"]})
    first, second, third = answer.json["embeddings"]
    assert first == third != second and len(first) == 8
    assert all(math.isclose(math.hypot(*each), 1, rel_tol=1e-6) for each in (first, second))
    assert answer.json["prompt_eval_count"] == 3 and answer.json["total_duration"] >= 0
    older = (await up.ask("POST", "/api/embeddings", json={"model": "scripted", "prompt": "a"})).json["embedding"]
    assert all(
        math.isclose(one / math.hypot(*older), other, abs_tol=1e-6) for one, other in zip(older, first, strict=True)
    )
    cut = await up.ask("POST", "/api/embed", json={"model": "scripted", "input": "a", "dimensions": 2})
    assert len(cut.json["embeddings"][0]) == 2
    job = answer.headers["x-request-id"]
    [line] = [json.loads(each) for each in (await up.resume(job)).body.splitlines()]
    assert line.pop("id").startswith(job) and line == answer.json
