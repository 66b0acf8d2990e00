"""Responses: what is read, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.wire.format import Parsed
from headrace.api.wire.openai_extras import HARMLESS
from headrace.api.wire.responses import Responses
from headrace.api.wire.responses_input import items_of
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Job, JsonObject, JsonSchema, Message, Regex, Sampling, Tool, ToolCall
from headrace.broker.settings import ApiSettings

RESPONSES = Responses()
LIMITS = ApiSettings()
SCHEMA = {"type": "object"}


def _parse(**fields: Any) -> Parsed:
    return RESPONSES.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode(), LIMITS)


def _job(**fields: Any) -> Job:
    return _parse(**fields).job


def _messages(**fields: Any) -> list[Message]:
    prompt = _job(**fields).prompt
    assert isinstance(prompt, Chat) and not prompt.is_open
    return prompt.messages


def _refused(**fields: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        _parse(**fields)
    return caught.value.param


def test_the_defaults() -> None:
    parsed = _parse()
    assert parsed.job == Job("", "m", Chat([Message("user", "hi")]))
    assert (parsed.stream, parsed.is_background, parsed.is_kept, parsed.band) == (False, False, True, None)
    assert not _parse(store=False).is_kept


OPTIONAL = (
    *("instructions", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice", "parallel_tool_calls"),
    *("text", "reasoning", "previous_response_id", "store", "metadata", "background", "stream", "stream_options"),
    *("truncation", "include", "top_logprobs", "user", "service_tier", "conversation", "prompt", "max_tool_calls"),
)


def test_h3_null_is_absent_for_every_optional_field() -> None:
    assert _parse(**dict.fromkeys(OPTIONAL)) == _parse()


def test_every_field_reaches_the_job() -> None:
    job = _job(
        instructions="be",
        max_output_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=7,
        stop=["x"],
        tools=[{"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        reasoning={"effort": "high"},
    )
    assert job == Job(
        "",
        "m",
        Chat([Message("system", "be"), Message("user", "hi")]),
        max_tokens=5,
        stop=["x"],
        sampling=Sampling(temperature=0, top_p=0.5, top_k=3, seed=7),
        tools=[Tool("f", "d", SCHEMA)],
        tool_choice="required",
        tool_name="f",
        parallel_tool_calls=False,
        constraint=JsonSchema(SCHEMA),
        think=True,
    )
    assert _job(text={"format": {"type": "text"}}, reasoning={}) == _job()
    assert _job(text={"format": {"type": "json_object"}}).constraint == JsonObject()
    assert _job(guided_regex="a").constraint == Regex("a")
    assert _job(reasoning={"effort": "none"}).think is False


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert _job(include=["message.output_text.logprobs"]).logprobs == 0
    assert _job(top_logprobs=3).logprobs == 3
    assert _job(include=["reasoning.encrypted_content"], top_logprobs=0).logprobs is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", None, 5]),
        ("input", [None, 5, [], {}, [5]]),
        ("instructions", [5, []]),
        ("max_output_tokens", [0, -1, "3", 3.0, True, 2**63]),
        ("temperature", [-0.1, 2.1, "1"]),
        ("top_logprobs", [-1, 21]),
        ("metadata", [{str(i): "x" for i in range(17)}, {"k" * 65: "x"}, {"k": "v" * 513}, []]),
        ("truncation", ["auto", 5]),
        ("conversation", ["conv_1", {"id": "conv_1"}]),
        ("prompt", [{"id": "pmpt_1"}]),
        ("response_format", [{"type": "json_object"}]),
        ("max_tokens", [5]),
        ("messages", [[]]),
        ("n", [2]),
        ("functions", [[{"name": "f"}]]),
        ("min_tokens", [1]),
        ("service_tier", ["fast"]),
        ("stream_options", [{}, 5]),
        ("background", ["yes", 1]),
        ("store", ["yes"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, values: list[object]) -> None:
    assert [_refused(**{name: value}) for value in values] == [name] * len(values)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"metadata": {"k": 5}}, "metadata"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"schema": SCHEMA}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_members_that_cannot_be_honoured_are_refused_by_their_place(fields: dict[str, Any], param: str) -> None:
    assert _refused(**fields) == param


def test_what_changes_nothing_may_be_there() -> None:
    same = {name: values[0] for name, values in HARMLESS.items() if values and name != "verbosity"}
    hints = {"prompt_cache_key": "k", "safety_identifier": "s", "stream_options": None}
    assert _parse(**same, **hints, truncation="disabled", include=[]) == _parse()


# -- input ------------------------------------------------------------------------------------------------------------

REASONING = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALL = {"type": "function_call", "id": "fc", "call_id": "c1", "name": "f", "arguments": "{}", "status": "completed"}
ANSWER = {"type": "function_call_output", "call_id": "c1", "output": "42"}


def _said(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg", "role": "assistant", "status": "completed", "content": [part]}


def _input(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([{"role": "user", "content": "a"}], [Message("user", "a")]),
        (
            [
                {
                    "role": "developer",
                    "content": [_input("a"), _input("b")],
                }
            ],
            [Message("system", "ab")],
        ),
        ([_said("a"), _said("b")], [Message("assistant", "a"), Message("assistant", "b")]),
        ([REASONING, _said("a")], [Message("assistant", "a", reasoning="hm")]),
        (
            [REASONING, _said("a"), CALL, {**CALL, "call_id": "c2"}],
            [Message("assistant", "a", [ToolCall("c1", "f", "{}"), ToolCall("c2", "f", "{}")], reasoning="hm")],
        ),
        (
            [CALL, REASONING],
            [Message("assistant", "", [ToolCall("c1", "f", "{}")]), Message("assistant", "", reasoning="hm")],
        ),
        (
            [CALL, ANSWER, {"role": "user", "content": "so?"}],
            [
                Message("assistant", "", [ToolCall("c1", "f", "{}")]),
                Message("tool", "42", tool_call_id="c1", name="f"),
                Message("user", "so?"),
            ],
        ),
        (
            [{**ANSWER, "output": [_input("4"), _input("2")]}],
            [Message("tool", "42", tool_call_id="c1")],
        ),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, _said("a")],
            [Message("assistant", "a", reasoning="s")],
        ),
    ],
)
def test_items_are_turns(items: list[dict[str, Any]], messages: list[Message]) -> None:
    assert _messages(input=items) == messages


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "tool", "content": "x"}, "role"),
        ({"role": "banana", "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "content[0].text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "name"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "arguments"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
        ({**ANSWER, "output": [{"type": "input_image"}]}, "output[0].type"),
        ({"type": "item_reference", "id": "msg_1"}, "type"),
        ({"type": "computer_call"}, "type"),
        ({"type": 5}, "type"),
    ],
)
def test_a_wrong_item_is_named_by_its_place(item: dict[str, Any], param: str) -> None:
    assert _refused(input=[{"role": "user", "content": "a"}, item]) == f"input[1].{param}"


def test_h7_items_are_bounded() -> None:
    one = {"role": "user", "content": "a"}
    assert _refused(input=[one] * (LIMITS.max_messages + 1)) == "input"


def test_items_come_back_as_they_were_said() -> None:
    items = [{"role": "system", "content": "be"}, REASONING, _said("a"), CALL, ANSWER, {"role": "user", "content": "x"}]
    messages = _messages(input=items)
    shown = items_of(messages, "ab")
    assert _messages(input=shown) == messages
    assert len({item["id"] for item in shown}) == len(shown) == len(items)
