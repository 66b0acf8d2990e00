"""Anthropic's Messages: what is said, block by block."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.wire import BY_NAME
from headrace.broker.errors import LogLost
from headrace.broker.messages import (
    AnyEvent,
    Claimed,
    Delta,
    Ended,
    Failure,
    Finished,
    Result,
    Started,
    ToolCallDelta,
    Unknown,
    Usage,
)
from tests.api.logs import Log, a_view, entries, streamed, whole
from tests.api.spoken import of_events, read_events

NAME = "anthropic.messages"
DONE = Ended("done", usage=Usage(7, 2, 3))
CALLS: Log = (
    Delta(0, "I look.", [1]),
    Delta(0, "", [2], tool_calls=[ToolCallDelta(0, "call_1", "f")]),
    Delta(0, "", [3], tool_calls=[ToolCallDelta(0, arguments='{"a')]),
    Delta(0, "", [4], tool_calls=[ToolCallDelta(0, arguments='":1}'), ToolCallDelta(1, "call_2", "g")]),
)


def _fold(*log: AnyEvent | list[AnyEvent], **view: Any) -> list[dict[str, Any]]:
    return streamed(NAME, log, **view)


def _blocks(frames: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Of each frame about a block what it does to which."""
    said: list[tuple[Any, ...]] = []
    for frame in frames:
        match frame["type"]:
            case "content_block_start":
                said.append((frame["index"], frame["content_block"]))
            case "content_block_delta":
                kind, *_ = frame["delta"]
                said.append((frame["index"], *frame["delta"].values()))
                assert kind == "type"
            case "content_block_stop":
                said.append((frame["index"],))
    return said


def test_a_stream_is_start_block_delta_stop() -> None:
    frames = _fold(Started(7, 3), Delta(0, "A", [1]), Delta(0, "", [2]), Delta(0, "B", [3]), Finished(0, "stop"), DONE)
    usage = {"input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    message = {"id": "msg_ab", "type": "message", "role": "assistant", "model": "m", "content": []}
    nothing: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
    assert frames[0] == {
        "type": "message_start",
        "message": {**message, **nothing, "usage": {**usage, "output_tokens": 0, "service_tier": "standard"}},
    }
    assert _blocks(frames) == [
        (0, {"type": "text", "text": ""}),
        (0, "text_delta", "A"),
        (0, "text_delta", "B"),
        (0,),
    ]
    assert frames[-2:] == [
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {**usage, "output_tokens": 2, "service_tier": "standard"},
        },
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("finish", "reason", "stop"),
    [
        (Finished(0, "stop"), "end_turn", None),
        (Finished(0, "length"), "max_tokens", None),
        (Finished(0, "stop", "STOP"), "stop_sequence", "STOP"),
        (Finished(0, "tool_calls"), "tool_use", None),
    ],
)
def test_a6_how_it_ends(finish: Finished, reason: str, stop: str | None) -> None:
    log: Log = (Started(7), [Delta(0, "A", [1]), finish], DONE)
    *_, delta, _ = streamed(NAME, log)
    body = whole(NAME, log)
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": stop}
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)


def test_an_answer_without_a_token_is_whole_too() -> None:
    log: Log = (Started(7), Finished(0, "stop"), DONE)
    assert [frame["type"] for frame in streamed(NAME, log)] == ["message_start", "message_delta", "message_stop"]
    assert whole(NAME, log)["content"] == []


def test_c1_calls_are_blocks_of_their_own() -> None:
    frames = _fold(Started(7), *CALLS, Finished(0, "tool_calls"), DONE)
    assert _blocks(frames) == [
        (0, {"type": "text", "text": ""}),
        (0, "text_delta", "I look."),
        (0,),
        (1, {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}),
        (1, "input_json_delta", '{"a'),
        (1, "input_json_delta", '":1}'),
        (1,),
        (2, {"type": "tool_use", "id": "call_2", "name": "g", "input": {}}),
        (2,),
    ]
    assert whole(NAME, (Started(7), *CALLS, Finished(0, "tool_calls"), DONE))["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_2", "name": "g", "input": {}},
    ]


def test_c1_arguments_that_come_late_go_to_their_own_call() -> None:
    late = Delta(0, "", [5], tool_calls=[ToolCallDelta(1, arguments='{"b":'), ToolCallDelta(0, arguments=" ")])
    last = Delta(0, "", [6], tool_calls=[ToolCallDelta(1, arguments="2}")])
    body = whole(NAME, (Started(7), *CALLS, late, last, Finished(0, "tool_calls"), DONE))
    assert [block.get("input") for block in body["content"]] == [None, {"a": 1}, {"b": 2}]
    deltas = [each for each in _blocks(_fold(Started(7), *CALLS, late, last)) if each[1:2] == ("input_json_delta",)]
    assert [(index, text) for index, _, text in deltas[2:]] == [(2, '{"b":'), (1, " "), (2, "2}")]


@pytest.mark.parametrize("arguments", ['{"a', "[1]", "5"])
def test_a_call_that_was_cut_off_has_no_input(arguments: str) -> None:
    call = Delta(0, "", [1], tool_calls=[ToolCallDelta(0, "call_1", "f", arguments)])
    [block] = whole(NAME, (Started(7), call, Finished(0, "length"), DONE))["content"]
    assert block == {"type": "tool_use", "id": "call_1", "name": "f", "input": {}}


def test_c3_thinking_is_a_block_before_the_text_and_is_signed() -> None:
    log: Log = (
        Started(7),
        Delta(0, "", [1], reasoning="r1"),
        Delta(0, "", [2], reasoning=" r2"),
        Delta(0, "answer", [3], reasoning=""),
        Finished(0, "stop"),
        DONE,
    )
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    assert _blocks(streamed(NAME, log))[:6] == [
        (0, thinking),
        (0, "thinking_delta", "r1"),
        (0, "thinking_delta", " r2"),
        (0, "signature_delta", "ab"),
        (0,),
        (1, {"type": "text", "text": ""}),
    ]
    thought = {**thinking, "thinking": "r1 r2", "signature": "ab"}
    assert whole(NAME, log)["content"] == [thought, {"type": "text", "text": "answer"}]
    omitted = {"options": {"omit_thinking": True}}
    assert whole(NAME, log, **omitted)["content"][0] == {**thought, "thinking": ""}
    assert [each[1:2] for each in _blocks(streamed(NAME, log, **omitted))][1] == ("signature_delta",)


def test_c3_a_limit_inside_the_thinking_leaves_it() -> None:
    log: Log = (Started(7), Delta(0, "", [1], reasoning="r1"), Finished(0, "length"), DONE)
    body = whole(NAME, log)
    assert [block["type"] for block in body["content"]] == ["thinking"] and body["stop_reason"] == "max_tokens"


def test_a_later_attempt_goes_on_with_the_same_message() -> None:
    frames = _fold(
        Started(7), Delta(0, "A", [1]), Claimed("x", "1-3"), Started(7), Delta(0, "B", [2]), Finished(0, "stop"), DONE
    )
    assert [frame["type"] for frame in frames].count("message_start") == 1
    assert of_events(frames).text == "AB"


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (Ended("failed", Failure("engine_error", "broken")), "api_error"),
        (Ended("failed", Failure("timeout")), "timeout_error"),
        (Ended("failed", Failure("queue_full")), "rate_limit_error"),
        (Ended("failed", Failure("invalid_request", "no", "tools")), "invalid_request_error"),
        (Ended("cancelled"), "api_error"),
        (Ended("failed"), "api_error"),
    ],
)
def test_a8_an_error_is_the_last_frame(end: Ended, kind: str) -> None:
    *_, last = _fold(Started(7), Delta(0, "A", [1]), end)
    assert (last["type"], last["error"]["type"], last["request_id"]) == ("error", kind, "ab")
    assert last["error"]["message"]


def test_the_type_of_an_error_of_the_pods_own() -> None:
    body = BY_NAME[NAME].error_body(LogLost())
    assert b'"type":"api_error"' in body and b'"request_id":null' in body


@pytest.mark.parametrize(
    ("param", "message"),
    [
        ("response_format", "output_config.format: no"),
        ("think", "thinking: no"),
        ("tools", "tools: no"),
        (None, "no"),
    ],
)
def test_fields_have_the_names_that_the_caller_knows(param: str | None, message: str) -> None:
    end = Ended("failed", Failure("invalid_request", "no", param))
    [frame] = _fold(end)
    assert frame["error"]["message"] == message


def test_a_count_is_one_object() -> None:
    log: Log = ([Started(9), Result({"tokens": 9})], Ended("done", usage=Usage(9, 0)))
    assert whole("anthropic.count_tokens", log) == {"input_tokens": 9}
    assert streamed("anthropic.count_tokens", log) == [{"input_tokens": 9}]
    [error] = streamed("anthropic.count_tokens", (Ended("done"),))
    assert error["error"]["type"] == "api_error"


# -- laws -------------------------------------------------------------------------------------------------------------

_texts = st.sampled_from(["", "x", "\n\ndata: {}\n\n", "event: error\n", "\r\n", "\u2028", "\u0085", "\0", '"}', "😀"])
_calls = st.lists(st.builds(ToolCallDelta, st.integers(0, 2), st.just("c"), st.just("f"), _texts), max_size=2)
_deltas = st.builds(
    lambda text, reasoning, calls: Delta(0, text, [1], None, reasoning, calls), _texts, st.none() | _texts, _calls
)
_ends = st.sampled_from(
    [Finished(0, "stop"), Finished(0, "length"), Finished(0, "stop", "S"), Finished(0, "tool_calls")]
)
_logs = st.builds(
    lambda deltas, end: (Started(7, 3), *deltas, Unknown(99), end, DONE), st.lists(_deltas, max_size=8), _ends
)


@settings(deadline=None)
@given(_logs)
def test_a_stream_and_a_whole_response_agree(log: Log) -> None:
    body, frames = whole(NAME, log), streamed(NAME, log)
    said = of_events(frames)
    assert said.text == "".join(block["text"] for block in body["content"] if block["type"] == "text")
    assert (said.reason, said.prompt_tokens, said.tokens) == (body["stop_reason"], 7, 2)
    begun = [frame["content_block"] for frame in frames if frame["type"] == "content_block_start"]
    assert [(b["type"], b.get("id")) for b in begun] == [(b["type"], b.get("id")) for b in body["content"]]
    for index, block in enumerate(body["content"]):
        deltas = [f["delta"] for f in frames if f["type"] == "content_block_delta" and f["index"] == index]
        name = block["type"] if block["type"] != "tool_use" else None
        if name:
            assert block[name] == "".join(delta.get(name, "") for delta in deltas)


@settings(deadline=None)
@given(_logs)
def test_a2_no_text_forges_or_breaks_a_frame(log: Log) -> None:
    form, fold = BY_NAME[NAME], BY_NAME[NAME].fold("0" * 32, a_view(NAME))
    written, said = b"", []
    for entry in entries(log):
        for payload in fold.feed(entry):
            written += form.frame(f"{'0' * 32}.{entry.id}", payload) + form.heartbeat("n\n\n", a_view(NAME))
            said.append(payload)
    assert len(read_events(written)) == len(said)
