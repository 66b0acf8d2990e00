"""Chat completions: what is said, entry by entry."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from headrace.api.wire.openai_chat import OpenAIChat
from headrace.broker.messages import (
    Alternative,
    AnyEvent,
    Claimed,
    Delta,
    Ended,
    Failure,
    Finished,
    Started,
    TokenLogprob,
    ToolCallDelta,
    Unknown,
    Usage,
)
from tests.api.logs import a_view, entries, streamed, whole

CHAT = OpenAIChat()
DONE = Ended("done", usage=Usage(5, 2, 1))


def _fold(*log: AnyEvent | list[AnyEvent], **view: Any) -> list[dict[str, Any]]:
    return streamed("openai.chat", log, **view)


def _whole(*log: AnyEvent | list[AnyEvent], **view: Any) -> dict[str, Any]:
    return whole("openai.chat", log, **view)


def _content(frames: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for frame in frames for choice in frame["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") for choice in choices)


def test_a_stream_is_role_text_finish() -> None:
    frames = _fold(Started(5), Delta(0, "A", [1]), Delta(0, "B", [2]), Finished(0, "stop"), DONE)
    head = {"id": "chatcmpl-ab", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "m"}
    deltas: list[tuple[dict[str, str], str | None]] = [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "A"}, None),
        ({"content": "B"}, None),
        ({}, "stop"),
    ]
    for frame, (delta, reason) in zip(frames, deltas, strict=True):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        assert frame == {**head, "choices": [choice]}
        ChatCompletionChunk.model_validate(frame, strict=True)


@pytest.mark.parametrize(
    ("events", "content", "reason"),
    [
        (
            [Delta(0, "", [1]), Delta(0, "A", [2]), Delta(0, "", [3]), Delta(0, "B", [4]), Finished(0, "stop")],
            "AB",
            "stop",
        ),
        ([Delta(0, "A", [1]), Delta(0, "B", [2]), Finished(0, "length")], "AB", "length"),
        ([Delta(0, "a", [1]), Delta(0, "", [2]), Finished(0, "stop", "STOP")], "a", "stop"),
        ([Finished(0, "stop")], "", "stop"),
        ([[Delta(0, "A", [1]), Finished(0, "length")]], "A", "length"),
    ],
)
def test_a6_the_finish_reason_is_null_in_all_but_the_last_chunk(
    events: list[AnyEvent | list[AnyEvent]], content: str, reason: str
) -> None:
    frames = _fold(Started(5), *events, DONE)
    reasons = [choice["finish_reason"] for frame in frames for choice in frame["choices"]]
    assert reasons == [None] * (len(frames) - 1) + [reason]
    assert _content(frames) == content
    answer = _whole(Started(5), *events, DONE)
    assert answer["choices"][0]["message"]["content"] == content
    assert answer["choices"][0]["finish_reason"] == reason


def test_held_text_makes_no_frame_and_half_characters_arrive_whole() -> None:
    """B1: the worker holds `F0 9F`, `98`; the character goes out with the step that completes it."""
    steps = [Delta(0, "", [1]), Delta(0, "", [2]), Delta(0, "😀", [3]), Delta(0, " ok", [4]), Delta(0, "歪", [5])]
    fold = CHAT.fold("ab", a_view(CHAT.name))
    made = [len(fold.feed(entry)) for entry in entries((Started(5), *steps, Finished(0, "stop"), DONE))]
    assert made == [0, 0, 1, 0, 0, 1, 1, 1, 1, 0]
    assert _content(_fold(Started(5), *steps, Finished(0, "stop"), DONE)) == "😀 ok歪"


def test_h11_choices_are_told_apart() -> None:
    log: list[AnyEvent | list[AnyEvent]] = [
        Started(5),
        [Delta(0, "a", [1]), Delta(1, "x", [1])],
        [Delta(1, "y", [2]), Delta(0, "b", [2]), Finished(0, "stop", "STOP")],
        [Delta(1, "z", [3]), Finished(1, "length")],
        Ended("done", usage=Usage(5, 5)),
    ]
    frames = _fold(*log, n=2, include_usage=True)
    assert [_content(frames, index) for index in (0, 1)] == ["ab", "xyz"]
    choices = [choice for frame in frames for choice in frame["choices"]]
    assert [choice["index"] for choice in choices if "role" in choice["delta"]] == [0, 1]
    assert [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]] == [(0, "stop"), (1, "length")]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 1, 0, 0, 1, 1]
    assert frames[-1]["usage"]["completion_tokens"] == 5

    answer = _whole(*log, n=2)
    ChatCompletion.model_validate(answer)
    assert [(c["index"], c["message"]) for c in answer["choices"]] == [
        (0, {"role": "assistant", "content": "ab"}),
        (1, {"role": "assistant", "content": "xyz"}),
    ]


def test_usage_is_the_last_chunk_and_null_before() -> None:
    frames = _fold(Started(5), Delta(0, "A", [1]), Finished(0, "stop"), DONE, include_usage=True)
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    assert [frame["usage"] for frame in frames] == [None, None, None, usage]
    assert frames[-1]["choices"] == []
    assert all("usage" not in frame for frame in _fold(Started(5), Finished(0, "stop"), DONE))
    assert _whole(Started(5), Finished(0, "stop"), DONE)["usage"] == usage


def test_a_second_attempt_makes_no_second_role_chunk() -> None:
    frames = _fold(Started(5), Delta(0, "A", [1]), Claimed("v", "1-3"), Started(6), Delta(0, "B", [2]))
    assert [frame["choices"][0]["delta"] for frame in frames] == [
        {"role": "assistant", "content": ""},
        {"content": "A"},
        {"content": "B"},
    ]


def test_unknown_events_make_no_frame() -> None:
    assert len(_fold(Unknown(99), Started(5), [Unknown(98), Delta(0, "A", [1]), Unknown(None)])) == 2


@pytest.mark.parametrize(
    ("ended", "code", "kind"),
    [
        (Ended("failed", Failure("engine_error")), "engine_error", "server_error"),
        (Ended("failed", Failure("of_a_newer_worker", "it says why")), "job_ended", "server_error"),
        (
            Ended("failed", Failure("context_length_exceeded", "", "messages")),
            "context_length_exceeded",
            "invalid_request_error",
        ),
        (Ended("failed"), "engine_error", "server_error"),
        (Ended("cancelled"), "cancelled", "server_error"),
        (Ended("cancelled", Failure("cancelled", "by its owner")), "cancelled", "server_error"),
    ],
)
def test_a8_a_job_that_did_not_finish_ends_in_one_error_frame(ended: Ended, code: str, kind: str) -> None:
    *before, last = _fold(Started(5), Delta(0, "A", [1]), Delta(0, "B", [2]), ended, include_usage=True)
    assert (last["error"]["code"], last["error"]["type"]) == (code, kind)
    assert last["error"]["param"] == (ended.error and ended.error.param)
    assert isinstance(last["error"]["message"], str) and last["error"]["message"]
    assert [choice["finish_reason"] for frame in before for choice in frame["choices"]] == [None] * 3
    assert _content(before) == "AB"


def test_a8_a_job_that_never_started_is_one_error_frame() -> None:
    (only,) = _fold(Ended("failed", Failure("no_capacity")))
    assert only["error"]["code"] == "no_capacity"


def _step(text: str, *pieces: bytes) -> Delta:
    return Delta(0, text, [1] * len(pieces), [TokenLogprob(1, piece, -0.5) for piece in pieces])


def _tokens(frames: list[dict[str, Any]]) -> list[list[str] | None]:
    shown = [choice["logprobs"] for frame in frames for choice in frame["choices"]]
    return [each and [token["token"] for token in each["content"]] for each in shown]


def test_the_shape_of_log_probabilities() -> None:
    top = [Alternative(2, b"B", -0.25), Alternative(3, "é".encode()[:1], float("-inf"))]
    delta = Delta(0, "A", [1], [TokenLogprob(1, b"A", -1.5, top)])
    log = (Started(5), delta, Finished(0, "stop"), DONE)
    frames = _fold(*log, logprobs=True)
    token = {"token": "A", "logprob": -1.5, "bytes": [65]}
    others = [
        {"token": "B", "logprob": -0.25, "bytes": [66]},
        {"token": "\ufffd", "logprob": -9999.0, "bytes": [195]},
    ]
    assert frames[1]["choices"][0]["logprobs"] == {"content": [{**token, "top_logprobs": others}], "refusal": None}
    assert frames[1]["choices"][0]["delta"] == {"content": "A"}
    ChatCompletionChunk.model_validate(frames[1], strict=True)
    assert _whole(*log, logprobs=True)["choices"][0]["logprobs"] == frames[1]["choices"][0]["logprobs"]


def test_log_probabilities_of_held_steps_wait_for_the_next_text() -> None:
    frames = _fold(Started(5), _step("", b"\xf0\x9f"), _step("", b"\x98"), _step("😀", b"\x80"), logprobs=True)
    assert _tokens(frames) == [None, ["\ufffd", "\ufffd", "\ufffd"]]


def test_log_probabilities_that_are_still_held_go_out_with_the_finish() -> None:
    log = (Started(5), _step("a", b"a"), _step("", b"\xf0"), Finished(0, "length"), DONE)
    assert _tokens(_fold(*log, logprobs=True)) == [None, ["a"], ["\ufffd"]]
    content = _whole(*log, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == ["a", "\ufffd"]


def test_log_probabilities_of_a_stop_string_are_dropped() -> None:
    log = (Started(5), _step("a", b"a"), _step("", b"ST"), _step("", b"OP"), Finished(0, "stop", "STOP"), DONE)
    assert _tokens(_fold(*log, logprobs=True)) == [None, ["a"], None]
    assert len(_whole(*log, logprobs=True)["choices"][0]["logprobs"]["content"]) == 1


def test_log_probabilities_that_nobody_asked_for_are_not_shown() -> None:
    log = (Started(5), _step("a", b"a"), Finished(0, "stop"), DONE)
    assert _tokens(_fold(*log)) == [None, None, None]
    assert _whole(*log)["choices"][0]["logprobs"] is None


def test_log_probabilities_of_choices_are_held_apart() -> None:
    one = Delta(1, "", [1], [TokenLogprob(1, b"x", -0.5)])
    frames = _fold(Started(5), one, _step("a", b"a"), Finished(1, "stop"), n=2, logprobs=True)
    assert _tokens(frames) == [None, None, ["a"], ["x"]]


# -- thoughts and calls -----------------------------------------------------------------------------------------------

CALLS: tuple[AnyEvent, ...] = (
    Started(5),
    Delta(0, "", [1, 2], reasoning="hm"),
    Delta(0, "Look.", [3], reasoning="!"),
    Delta(0, "", [4], tool_calls=[ToolCallDelta(0, "c0", "f", '{"a"')]),
    Delta(0, "", [5], tool_calls=[ToolCallDelta(0, arguments=":1}"), ToolCallDelta(1, "c1", "g")]),
    Delta(0, "", [6], tool_calls=[ToolCallDelta(1, arguments="{}")]),
    Finished(0, "tool_calls"),
    DONE,
)


def test_calls_are_streamed_by_index_and_say_id_type_and_name_once() -> None:
    frames = _fold(*CALLS)
    for frame in frames:
        ChatCompletionChunk.model_validate(frame)
    first = {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    second = {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": ""}}
    assert [frame["choices"][0]["delta"] for frame in frames] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"reasoning_content": "!", "content": "Look."},
        {"tool_calls": [first]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}, second]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]},
        {},
    ]
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None] * 6 + ["tool_calls"]


def test_a_whole_message_has_its_calls_and_thoughts() -> None:
    answer = _whole(*CALLS)
    ChatCompletion.model_validate(answer)
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Look.",
        "reasoning_content": "hm!",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert _fold(*CALLS, include_usage=True)[-1]["usage"] == answer["usage"]


def test_calls_without_text_have_null_content() -> None:
    call = Delta(0, "", [1], tool_calls=[ToolCallDelta(0, "c", "f", "{}")])
    message = _whole(Started(5), call, Finished(0, "tool_calls"), DONE)["choices"][0]["message"]
    assert message["content"] is None


def test_a_call_without_an_id_gets_the_same_one_from_every_reader() -> None:
    call = Delta(0, "", [1], tool_calls=[ToolCallDelta(0, "", "f", "{}"), ToolCallDelta(1, "", "f", "{}")])
    log = (Started(5), call, Finished(0, "tool_calls"), DONE)
    streamed_ids = [each["id"] for each in _fold(*log)[1]["choices"][0]["delta"]["tool_calls"]]
    whole_ids = [each["id"] for each in _whole(*log)["choices"][0]["message"]["tool_calls"]]
    assert streamed_ids == whole_ids
    assert len(set(whole_ids)) == 2 and all(whole_ids)


def test_calls_of_choices_are_held_apart() -> None:
    call = [Delta(index, "", [1], tool_calls=[ToolCallDelta(0, f"c{index}", "f", str(index))]) for index in (0, 1)]
    answer = _whole(Started(5), *call, Finished(0, "tool_calls"), Finished(1, "tool_calls"), DONE, n=2)
    calls = [choice["message"]["tool_calls"] for choice in answer["choices"]]
    assert [each[0]["id"] for each in calls] == ["c0", "c1"]
    assert [len(each) for each in calls] == [1, 1]


def test_log_probabilities_of_thoughts_go_out_with_them() -> None:
    thought = Delta(0, "", [1], [TokenLogprob(1, b"hm", -0.5)], reasoning="hm")
    log = (Started(5), thought, _step("a", b"a"), Finished(0, "stop"), DONE)
    assert _tokens(_fold(*log, logprobs=True)) == [None, ["hm"], ["a"], None]
    assert len(_whole(*log, logprobs=True)["choices"][0]["logprobs"]["content"]) == 2
