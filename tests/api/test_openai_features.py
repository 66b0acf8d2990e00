"""Chat requests: tools, constraints, thinking, prefill, and the sampling fields of other servers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.broker.messages import (
    Chat,
    Grammar,
    JsonObject,
    JsonSchema,
    Message,
    Regex,
    Sampling,
    Tool,
    ToolCall,
)
from tests.api.asking import USER, messages_of, parse, refused

# -- what vLLM's and llama-server's clients say -----------------------------------------------------------------------


def test_sampling_fields_of_other_servers_are_read() -> None:
    said = {"top_k": 5, "min_p": 0.1, "typical_p": 0.9, "repetition_penalty": 1.1, "repeat_last_n": 64}
    job = parse(**said, ignore_eos=True).job
    assert job.sampling == Sampling(top_k=5, min_p=0.1, typical_p=0.9, repeat_penalty=1.1, repeat_last_n=64)
    assert job.ignore_eos is True
    assert [parse(top_k=value).job.sampling.top_k for value in (-1, 0, None)] == [0, 0, None]
    assert parse(repeat_penalty=1.1).job.sampling.repeat_penalty == 1.1
    assert parse(repeat_penalty=1.1, repetition_penalty=1.1).job.sampling.repeat_penalty == 1.1
    assert refused(repeat_penalty=1.1, repetition_penalty=1.2).param == "repeat_penalty"


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, JsonSchema(SCHEMA)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            JsonSchema(SCHEMA),
        ),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, JsonSchema(SCHEMA)),
        ({"guided_json": SCHEMA}, JsonSchema(SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, JsonSchema(SCHEMA)),
        ({"guided_regex": "[ab]+"}, Regex("[ab]+")),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA)),
        ({"structured_outputs": {"regex": "a", "choice": None}}, Regex("a")),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        ({"structured_outputs": {}}, None),
        ({"json_schema": SCHEMA}, JsonSchema(SCHEMA)),
        ({"grammar": 'root ::= "a"'}, Grammar('root ::= "a"')),
    ],
)
def test_a_constraint_has_many_names(fields: dict[str, Any], constraint: object) -> None:
    assert parse(**fields).job.constraint == constraint


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"guided_json": "[" * 300_000}, "guided_json"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "x"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": SCHEMA, "grammar": "x"}, "grammar"),
    ],
)
def test_a_constraint_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "think"),
    [
        ({}, None),
        ({"reasoning_effort": "none"}, False),
        *[({"reasoning_effort": effort}, True) for effort in ("minimal", "low", "medium", "high", "xhigh")],
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"chat_template_kwargs": {}}, None),
        ({"enable_thinking": True, "reasoning_effort": "low"}, True),
    ],
)
def test_whether_to_think_has_three_names(fields: dict[str, Any], think: bool | None) -> None:
    assert parse(**fields).job.think is think


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"chat_template_kwargs": {"other": 1}}, "chat_template_kwargs.other"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "chat_template_kwargs.thinking"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "enable_thinking"),
        (
            {"chat_template_kwargs": {"thinking": True, "enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
    ],
)
def test_thinking_that_cannot_be_read_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


# -- tools ------------------------------------------------------------------------------------------------------------


def _tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("choice", "said", "name"),
    [
        (None, "auto", None),
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        (NAMED, "required", "f"),
    ],
)
def test_a_tool_choice_is_a_word_or_a_function(choice: object, said: str, name: str | None) -> None:
    job = parse(tools=[_tool(), _tool("g")], tool_choice=choice).job
    assert ([tool.name for tool in job.tools], job.tool_choice, job.tool_name) == (["f", "g"], said, name)


def test_a_tool_is_read_whole() -> None:
    full = _tool(description="d", parameters=SCHEMA, strict=True)
    job = parse(tools=[full], parallel_tool_calls=False).job
    assert (job.tools, job.parallel_tool_calls) == ([Tool("f", "d", SCHEMA)], False)
    assert parse(parallel_tool_calls=False).job.parallel_tool_calls is None
    assert parse(tool_choice="auto") == parse()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [_tool(), {"type": "custom", "custom": {"name": "x"}}]}, "tools[1].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [_tool("")]}, "tools[0].function.name"),
        ({"tools": [_tool("a b")]}, "tools[0].function.name"),
        ({"tools": [_tool("x" * 129)]}, "tools[0].function.name"),
        ({"tools": [_tool(), _tool()]}, "tools[1].function.name"),
        ({"tools": [_tool(parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [_tool(f"f{index}") for index in range(1025)]}, "tools"),
        ({"tools": "x"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "f", "tools": [_tool()]}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice.function.name"),
        ({"tool_choice": NAMED, "tools": [_tool("g")]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}, "tools": [_tool()]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [_tool()]}, "tool_choice.type"),
        ({"tool_choice": 5, "tools": [_tool()]}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_cannot_be_honoured_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


def test_calls_and_what_they_answered_are_turns() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        {"role": "tool", "tool_call_id": "of another talk", "content": ""},
    ]
    assert messages_of(turns)[1:] == [
        Message("assistant", "", [ToolCall("c1", "f", "{}")], reasoning="hm"),
        Message("tool", "42", tool_call_id="c1", name="f"),
        Message("tool", "", tool_call_id="of another talk"),
    ]


# -- going on in the assistant's last message -------------------------------------------------------------------------

PREFILL = [USER, {"role": "assistant", "content": "Once"}]


@pytest.mark.parametrize(
    ("fields", "is_open"),
    [
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": True}, True),
        ({"continue_final_message": False}, False),
        ({"add_generation_prompt": True}, False),
    ],
)
def test_a_last_message_of_the_assistant_is_gone_on_with(fields: dict[str, Any], is_open: bool) -> None:
    prompt = parse(messages=PREFILL, **fields).job.prompt
    assert prompt == Chat([Message("user", "hi"), Message("assistant", "Once")], is_open)


def test_no_other_last_message_is_gone_on_with() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for last in (USER, {"role": "assistant", "content": "x", "tool_calls": [call]}):
        prompt = parse(messages=[USER, last]).job.prompt
        assert isinstance(prompt, Chat) and not prompt.is_open
        assert refused(messages=[USER, last], continue_final_message=True).param == "continue_final_message"
        assert refused(messages=[USER, last], add_generation_prompt=False).param == "add_generation_prompt"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(messages=PREFILL, **both).param == "add_generation_prompt"
