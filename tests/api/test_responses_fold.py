"""Responses: what is said, event by event."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from headrace.api.wire.responses import Responses
from headrace.broker.errors import LogLost
from headrace.broker.messages import (
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
from headrace.broker.settings import ApiSettings
from tests.api.logs import Log, a_view, entries, streamed, whole

RESPONSES = Responses()
DONE = Ended("done", usage=Usage(5, 2, 1))
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANSWER = (Started(5), Delta(0, "A", [1]), Delta(0, "", [2]), Delta(0, "B", [3]), Finished(0, "stop"), DONE)


def _options(**fields: Any) -> dict[str, Any]:
    body = json.dumps({"model": "m", "input": "hi", **fields}).encode()
    return RESPONSES.parse(body, ApiSettings()).options


def _fold(*log: AnyEvent | list[AnyEvent], **fields: Any) -> list[dict[str, Any]]:
    """The events of a log; each must be one that the official client knows, and be in its place."""
    view = {name: fields.pop(name) for name in ("logprobs", "n") if name in fields}
    events = streamed("openai.responses", log, options=_options(**fields), **view)
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _whole(*log: AnyEvent | list[AnyEvent], **fields: Any) -> dict[str, Any]:
    return whole("openai.responses", log, options=_options(**fields))


def _types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_stream_is_an_item_with_a_part_with_text() -> None:
    events = _fold(*ANSWER)
    assert _types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    part = {"type": "output_text", "text": "AB", "annotations": [], "logprobs": []}
    item = {"id": "msg_ab_0", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    assert events[2]["item"] == {**item, "status": "in_progress", "content": []}
    assert events[3]["part"] == {**part, "text": ""}
    place = {"item_id": "msg_ab_0", "output_index": 0, "content_index": 0}
    assert events[4] == {
        "type": "response.output_text.delta",
        "sequence_number": 4,
        **place,
        "delta": "A",
        "logprobs": [],
    }
    assert events[8]["item"] == item
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert events[0]["response"]["id"] == "resp_ab" and events[0]["response"]["created_at"] == 1_700_000_000
    assert events[9]["response"] == _whole(*ANSWER)


def test_the_whole_response_repeats_its_request() -> None:
    asked: dict[str, Any] = {
        "instructions": "be brief",
        "max_output_tokens": 9,
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.9,
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "user": "u",
        "previous_response_id": "resp_x",
    }
    answer = _whole(*ANSWER, **asked)
    Response.model_validate(answer)
    assert {name: answer[name] for name in asked if name != "tools"} == {
        name: value for name, value in asked.items() if name != "tools"
    }
    assert answer["tools"][0]["name"] == "f"
    assert answer["output"][0]["content"][0]["text"] == "AB"
    assert answer["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    assert (answer["store"], answer["background"], answer["truncation"]) == (True, False, "disabled")


THINKING = (Started(5), Delta(0, "", [1, 2], reasoning="h"), Delta(0, "", [3], reasoning="m"), *ANSWER[1:])


def test_thoughts_are_an_item_before_the_text() -> None:
    events = _fold(*THINKING)
    assert _types(events)[2:10] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    reasoning, message = events[-1]["response"]["output"]
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "hm"}])
    assert (reasoning["id"], message["id"]) == ("rs_ab_0", "msg_ab_1")
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


def test_thoughts_are_a_summary_if_one_was_asked_for() -> None:
    events = _fold(*THINKING, reasoning={"summary": "auto", "effort": "low"})
    assert _types(events)[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    reasoning = events[-1]["response"]["output"][0]
    assert (reasoning["summary"], reasoning["content"]) == ([{"type": "summary_text", "text": "hm"}], [])


CALLS: Log = (
    Started(5),
    Delta(0, "Look.", [1]),
    Delta(0, "", [2], tool_calls=[ToolCallDelta(0, "c0", "f", '{"a"')]),
    Delta(0, "", [3], tool_calls=[ToolCallDelta(1, "c1", "g"), ToolCallDelta(0, arguments=":1}")]),
    Delta(0, "", [4], tool_calls=[ToolCallDelta(1, arguments="{}")]),
    Finished(0, "tool_calls"),
    DONE,
)


def test_calls_are_items_that_may_grow_at_the_same_time() -> None:
    events = _fold(*CALLS)
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert [(delta["output_index"], delta["delta"]) for delta in deltas] == [(1, '{"a"'), (1, ":1}"), (2, "{}")]
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(each["item_id"], each["arguments"]) for each in done] == [("fc_ab_1", '{"a":1}'), ("fc_ab_2", "{}")]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["type"] for item in added] == ["message", "function_call", "function_call"]
    assert (added[1]["call_id"], added[1]["name"], added[1]["arguments"]) == ("c0", "f", "")
    assert _types(events)[-5:] == [
        "function_call_arguments.done",
        "output_item.done",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    message, first, second = events[-1]["response"]["output"]
    assert message["status"] == first["status"] == second["status"] == "completed"
    assert (second["call_id"], second["name"], second["arguments"]) == ("c1", "g", "{}")


def test_text_after_a_call_is_another_message() -> None:
    log = (*CALLS[:3], Delta(0, "More.", [5]), Finished(0, "tool_calls"), DONE)
    output = _fold(*log)[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert output[2]["content"][0]["text"] == "More."


def test_a_limit_makes_it_incomplete() -> None:
    events = _fold(Started(5), Delta(0, "", [1], reasoning="h"), Delta(0, "A", [2]), Finished(0, "length"), DONE)
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]


def test_an_answer_of_nothing_is_a_message_without_text() -> None:
    events = _fold(Started(5), Delta(0, "", [1]), Finished(0, "stop"), DONE)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
    assert "response.output_text.delta" not in _types(events)


@pytest.mark.parametrize(
    ("ended", "status", "code"),
    [
        (Ended("failed", Failure("engine_error")), "failed", "engine_error"),
        (Ended("failed", Failure("context_length_exceeded", "", "input")), "failed", "context_length_exceeded"),
        (Ended("cancelled"), "cancelled", "cancelled"),
    ],
)
def test_a8_a_job_that_did_not_finish_ends_in_one_failed_event(ended: Ended, status: str, code: str) -> None:
    events = streamed("openai.responses", (Started(5), Delta(0, "A", [1]), ended), options=_options())
    assert [event["type"] for event in events].count("response.failed") == 1
    response = events[-1]["response"]
    assert (events[-1]["type"], response["status"], response["error"]["code"]) == ("response.failed", status, code)
    assert response["error"]["message"]
    [item] = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "A")
    before = streamed("openai.responses", (ended,), options=_options())
    assert _types(before) == ["created", "failed"]


def test_a_second_attempt_goes_on_in_the_same_item() -> None:
    log = (Started(5), Delta(0, "A", [1]), Claimed("v", "1-3"), Started(6), Delta(0, "B", [2]))
    assert _types(_fold(*log, Finished(0, "stop"), DONE)) == _types(_fold(*ANSWER))


def test_a_background_response_is_queued_first() -> None:
    events = _fold(*ANSWER, background=True)
    assert _types(events)[:3] == ["created", "queued", "in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]


def test_what_has_come_so_far_can_be_said_at_any_moment() -> None:
    assert (_whole()["status"], _whole(background=True)["status"]) == ("in_progress", "queued")
    half = _whole(*CALLS[:4])
    Response.model_validate(half)
    assert (half["status"], half["usage"]) == ("in_progress", None)
    assert [item["status"] for item in half["output"]] == ["completed", "in_progress", "in_progress"]
    assert half["output"][1]["arguments"] == '{"a":1}'


def test_log_probabilities_stand_in_deltas_and_in_the_part() -> None:
    held = Delta(0, "", [1], [TokenLogprob(1, b"\xf0\x9f", -0.5)])
    shown = Delta(0, "😀", [2], [TokenLogprob(2, b"\x98\x80", -0.25)])
    events = _fold(Started(5), held, shown, Finished(0, "stop"), DONE, logprobs=True)
    delta = next(event for event in events if event["type"] == "response.output_text.delta")
    assert [(token["bytes"], token["logprob"]) for token in delta["logprobs"]] == [
        ([0xF0, 0x9F], -0.5),
        ([0x98, 0x80], -0.25),
    ]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == delta["logprobs"]


def test_a_job_of_another_format_can_be_read_too() -> None:
    log = (Started(5), Delta(0, "A", [1]), Delta(1, "x", [1]), Finished(1, "stop"), Finished(0, "stop"), DONE)
    for each in (streamed("openai.responses", log, n=2)[-1]["response"], whole("openai.responses", log, n=2)):
        Response.model_validate(each)
        assert [item["content"][0]["text"] for item in each["output"]] == ["A"]


def test_unknown_events_make_no_frame() -> None:
    assert _types(_fold(Unknown(99), Started(5), [Unknown(98)])) == ["created", "in_progress"]


def test_a_frame_names_its_event() -> None:
    fold = RESPONSES.fold("ab", a_view(RESPONSES.name, options=_options()))
    frames = [frame for entry in entries(ANSWER) for frame in fold.feed(entry)]
    for payload in frames:
        kind = json.loads(payload)["type"]
        assert RESPONSES.frame("ab.1-1", payload) == f"event: {kind}\nid: ab.1-1\ndata: ".encode() + payload + b"\n\n"


def test_an_error_of_the_pods_own_is_an_error_event_that_clients_raise() -> None:
    payload = RESPONSES.error_frame(LogLost("gone"))
    assert RESPONSES.frame("", payload).startswith(b'event: error\ndata: {"type":"error",')
    said = json.loads(payload)
    assert (said["code"], said["message"], said["error"]["code"]) == ("log_lost", "gone", "log_lost")
