"""What a request in Anthropic's format means to a worker, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.wire.anthropic_messages import AnthropicCountTokens, AnthropicMessages
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Job, JsonSchema, Message, Sampling, Tool, ToolCall
from headrace.broker.settings import ApiSettings

LIMITS = ApiSettings(max_messages=8, max_stops=2, max_stop_chars=5)
MESSAGES = AnthropicMessages()
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}


def body(**fields: Any) -> bytes:
    """The least that a request must say, and `fields`; a field that is `...` is left out."""
    said = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps({name: value for name, value in said.items() if value is not ...}).encode()


def job(**fields: Any) -> Job:
    return MESSAGES.parse(body(**fields), LIMITS).job


def chat(*turns: tuple[str, Any], **fields: Any) -> Chat:
    prompt = job(messages=[{"role": role, "content": content} for role, content in turns], **fields).prompt
    assert isinstance(prompt, Chat)
    return prompt


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "cache_control": {"type": "ephemeral"}}


def test_what_is_not_said_is_the_default() -> None:
    assert job() == Job("", "m", Chat([Message("user", "hi")]), max_tokens=9)
    parsed = MESSAGES.parse(body(), LIMITS)
    assert (parsed.stream, parsed.include_usage, parsed.band, parsed.options) == (False, False, None, {})


def test_h3_every_field_reaches_the_worker_and_zero_as_zero() -> None:
    zeros = job(temperature=0, top_p=0, top_k=0)
    assert zeros.sampling == Sampling(temperature=0, top_p=0, top_k=0)
    made = job(temperature=1, top_p=0.5, top_k=7, stop_sequences=["x"], stream=True)
    assert (made.sampling, made.stop) == (Sampling(temperature=1, top_p=0.5, top_k=7), ["x"])
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "stop_sequences", "stream", "system", "tools", "thinking"))
    assert job(**nulls) == job()
    hints = {"metadata": {"user_id": "u"}, "service_tier": "auto", "output_config": {"effort": "low"}, "unknown": [1]}
    assert job(**hints) == job()


def test_system_comes_first_as_text_or_blocks() -> None:
    assert chat(("user", "hi"), system="be").messages[0] == Message("system", "be")
    assert chat(("user", "hi"), system=[text("be"), text("good")]).messages[0] == Message("system", "be\ngood")
    assert chat(("user", "hi"), system="").messages == [Message("user", "hi")]
    assert chat(("user", "a"), ("system", "b"), ("user", "c")).messages[1] == Message("system", "b")


def test_turns_of_one_role_are_one_turn() -> None:
    made = chat(("user", "a"), ("user", [text("b"), text("c")]), ("assistant", "d"), ("assistant", "e"), ("user", "f"))
    assert made.messages == [Message("user", "a\nb\nc"), Message("assistant", "d\ne"), Message("user", "f")]
    assert not made.is_open


def test_an_assistants_turn_at_the_end_is_gone_on_with() -> None:
    assert chat(("user", "a"), ("assistant", "It is")) == Chat(
        [Message("user", "a"), Message("assistant", "It is")], is_open=True
    )
    assert chat(("user", "a"), ("assistant", "")) == Chat([Message("user", "a")])


def test_calls_and_their_results() -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("x"), text("y")], "is_error": True}
    made = chat(
        ("user", "go"),
        ("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), CALL]),
        ("user", [result, text("and?")]),
    )
    assert made.messages == [
        Message("user", "go"),
        Message("assistant", "I look.", [ToolCall("t1", "f", '{"a":1}')], reasoning="hm"),
        Message("tool", "x\ny", tool_call_id="t1", name="f"),
        Message("user", "and?"),
    ]
    contents: list[Any] = ["z", None, []]
    for content in contents:
        empty = {"type": "tool_result", "tool_use_id": "t1", "content": content}
        assert chat(("assistant", [CALL]), ("user", [empty])).messages[-1].content == (content or "")


def test_what_was_redacted_is_left_out() -> None:
    made = chat(("user", "a"), ("assistant", [{"type": "redacted_thinking", "data": "x"}, text("b")]), ("user", "c"))
    assert made.messages[1] == Message("assistant", "b")


def test_tools_and_which_of_them_to_use() -> None:
    tool = Tool("f", "does", {"type": "object"})
    assert job(tools=[TOOL]).tools == [tool]
    assert job(tools=[{**TOOL, "type": "custom", "description": None}]).tools == [Tool("f", "", {"type": "object"})]
    choices: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
        ({"type": "auto"}, ("auto", None, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", None, True)),
        ({"type": "tool", "name": "f"}, ("required", "f", None)),
        ({"type": "none"}, ("none", None, None)),
    ]
    for choice, (meant, name, parallel) in choices:
        made = job(tools=[TOOL], tool_choice=choice)
        assert (made.tool_choice, made.tool_name, made.parallel_tool_calls) == (meant, name, parallel)


def test_thinking() -> None:
    assert job().think is None
    assert job(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1025).think is True
    assert job(thinking={"type": "disabled"}).think is False
    assert job(thinking={"type": "adaptive"}).think is None
    omitted = MESSAGES.parse(body(thinking={"type": "adaptive", "display": "omitted"}), LIMITS)
    assert omitted.options == {"omit_thinking": True}


def test_a_schema_constrains_the_answer() -> None:
    made = job(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})
    assert made.constraint == JsonSchema({"type": "object"})


def test_a_count_is_a_job_of_its_kind() -> None:
    parsed = AnthropicCountTokens().parse(body(max_tokens=..., system="be", tools=[TOOL], stream=True), LIMITS)
    assert not parsed.stream
    assert parsed.job.kind == "count" and parsed.job.tools == job(tools=[TOOL]).tools
    assert parsed.job.prompt == Chat([Message("system", "be"), Message("user", "hi")])


def turns(*contents: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": each} for index, each in enumerate(contents)]}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("model", {"model": ""}),
        ("model", {"model": ...}),
        ("max_tokens", {"max_tokens": ...}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "3"}),
        ("max_tokens", {"max_tokens": 3.0}),
        ("max_tokens", {"max_tokens": 2**63}),
        ("temperature", {"temperature": 1.1}),
        ("temperature", {"temperature": -0.1}),
        ("top_p", {"top_p": 2}),
        ("top_k", {"top_k": -1}),
        ("stop_sequences", {"stop_sequences": [""]}),
        ("stop_sequences", {"stop_sequences": "x"}),
        ("stop_sequences", {"stop_sequences": [None]}),
        ("stop_sequences", {"stop_sequences": ["a", "b", "c"]}),
        ("stop_sequences", {"stop_sequences": ["abcdef"]}),
        ("n", {"n": 2}),
        ("service_tier", {"service_tier": "priority"}),
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "x"}] * 9}),
        ("messages[0].role", {"messages": [{"role": "banana", "content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user"}]}),
        ("messages[0].content", turns("")),
        ("messages[0].content", turns([])),
        ("messages[0].content", turns([{"type": "text", "text": ""}])),
        ("messages[1].content", {"messages": [*turns("a", "")["messages"], {"role": "user", "content": "b"}]}),
        ("messages[0].content", {"messages": [{"role": "assistant", "content": ""}]}),
        ("messages[0].content[0].text", turns([{"type": "text"}])),
        ("messages[0].content[1].type", turns([{"type": "text", "text": "a"}, {"type": "image", "source": {}}])),
        ("messages[0].content[0].type", turns([{"type": "document", "source": {}}])),
        ("messages[1].content[0].type", turns("a", [{"type": "server_tool_use", "id": "x", "name": "y"}])),
        ("messages[1].content[0].id", turns("a", [{"type": "tool_use", "name": "f"}])),
        ("messages[1].content[0].name", turns("a", [{"type": "tool_use", "id": "t1"}])),
        ("messages[1].content[0].input", turns("a", [{**CALL, "input": "x"}])),
        ("messages", turns("a", [CALL])),
        ("messages[0].content[0].tool_use_id", turns([{"type": "tool_result", "tool_use_id": "t1"}])),
        (
            "messages[2].content[0].content[0].type",
            turns("a", [CALL], [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}]),
        ),
        ("system[0].type", {"system": [{"type": "image"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ("tools[1].type", {"tools": [TOOL, {"type": "bash_20250124", "name": "bash"}]}),
        ("tools[0].name", {"tools": [{**TOOL, "name": ""}]}),
        ("tools[0].input_schema", {"tools": [{"name": "f"}]}),
        ("tools[0].strict", {"tools": [{**TOOL, "strict": True}]}),
        ("tools[0].defer_loading", {"tools": [{**TOOL, "defer_loading": True}]}),
        ("tools[0].input_examples", {"tools": [{**TOOL, "input_examples": [{}]}]}),
        ("tools[0].allowed_callers", {"tools": [{**TOOL, "allowed_callers": ["code_execution_20250825"]}]}),
        ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "some"}}),
        ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}),
        ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
        ("tool_choice", {"tool_choice": {"type": "any"}}),
        ("thinking.type", {"thinking": {"type": "between_tools"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2000}),
        ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 2000}),
        ("thinking.display", {"thinking": {"type": "adaptive", "display": "all"}}),
        ("output_config.format.type", {"output_config": {"format": {"type": "grammar"}}}),
        ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
        ("container", {"container": "c"}),
        ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
        ("context_management", {"context_management": {"edits": [1]}}),
        ("inference_geo", {"inference_geo": "eu"}),
        ("diagnostics", {"diagnostics": {"previous_message_id": None}}),
        ("output_format", {"output_format": {"type": "json_schema"}}),
    ],
)
def test_h1_h4_what_cannot_be_done_is_refused_by_name(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        MESSAGES.parse(body(**fields), LIMITS)
    assert refused.value.param == param
    assert param in json.loads(MESSAGES.error_body(refused.value))["error"]["message"]
