"""The laws of OpenAI's three folds, for logs with thoughts and calls in which the model tries to forge frames."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.wire import BY_NAME
from headrace.broker.messages import Delta, Ended, Finished, ReadEntry, View
from tests.api.rich_logs import rich_logs

NAMES = ("openai.chat", "openai.completions", "openai.responses")
formats = pytest.mark.parametrize("name", NAMES)
Case = tuple[View, list[ReadEntry]]


def wire(name: str, view: View, log: list[ReadEntry]) -> bytes:
    """A stream as it goes out."""
    form = BY_NAME[name]
    fold = form.fold("ab", view)
    frames = [form.frame(entry.id, frame) for entry in log for frame in fold.feed(entry)]
    return b"".join(frames) + form.terminator


def read(stream: bytes) -> list[dict[str, Any]]:
    """Read a stream as strictly as it is written; all that splits lines anywhere must be where a frame ends."""
    text = stream.decode()
    assert "".join(text.splitlines(keepends=True)) == text and len(text.splitlines()) == text.count("\n")
    frames = []
    for block in text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields.keys() <= {"event", "id", "data"}
        said = json.loads(fields["data"])
        assert fields.get("event") == said.get("type")
        frames.append(said)
    return frames


def ended(log: list[ReadEntry]) -> Ended:
    last = log[-1].events[-1]
    assert isinstance(last, Ended)
    return last


def deltas_of(log: list[ReadEntry], choice: int) -> list[Delta]:
    return [event for entry in log for event in entry.events if isinstance(event, Delta) and event.choice == choice]


def arguments_of(deltas: list[Delta]) -> list[str]:
    calls: dict[int, str] = defaultdict(str)
    for delta in deltas:
        for call in delta.tool_calls or []:
            calls[call.index] += call.arguments
    return [calls[index] for index in sorted(calls)]


@formats
@given(case=rich_logs(), cut=st.integers(0, 30))
def test_a_fold_from_the_start_says_the_same_to_every_reader(name: str, case: Case, cut: int) -> None:
    view, log = case
    form = BY_NAME[name]
    once, again = form.fold("ab", view), form.fold("ab", view)
    undisturbed = [once.feed(entry) for entry in log]
    for entry in log[:cut]:
        again.feed(entry)
    assert [again.feed(entry) for entry in log[cut:]] == undisturbed[cut:]


@formats
@given(case=rich_logs())
def test_a_model_cannot_forge_or_break_a_frame(name: str, case: Case) -> None:
    view, log = case
    frames = read(wire(name, view, log))
    failures = [frame for frame in frames if "error" in frame or frame.get("type") == "response.failed"]
    assert failures == ([] if ended(log).status == "done" else frames[-1:])


@given(case=rich_logs())
def test_chat_says_all_of_each_choice_streamed_and_whole(case: Case) -> None:
    view, log = case
    if ended(log).status != "done":
        return
    frames = read(wire("openai.chat", view, log))
    fold = BY_NAME["openai.chat"].whole("ab", view)
    for entry in log:
        fold.feed(entry)
    body = json.loads(fold.body())
    for index in range(view.n):
        shown = [c for frame in frames for c in frame["choices"] if c["index"] == index]
        deltas, whole = deltas_of(log, index), body["choices"][index]
        text = "".join(delta.text for delta in deltas)
        thoughts = "".join(delta.reasoning or "" for delta in deltas)
        assert "".join(c["delta"].get("content", "") for c in shown) == text == (whole["message"]["content"] or "")
        assert "".join(c["delta"].get("reasoning_content", "") for c in shown) == thoughts
        assert whole["message"].get("reasoning_content", "") == thoughts
        calls = [call for c in shown for call in c["delta"].get("tool_calls", [])]
        heads = [call for call in calls if "id" in call]
        assert [call["index"] for call in heads] == list(range(len(heads)))
        joined = ["".join(c["function"]["arguments"] for c in calls if c["index"] == at) for at in range(len(heads))]
        assert joined == arguments_of(deltas)
        whole_calls = whole["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in whole_calls] == joined
        assert [(c["id"], c["function"]["name"]) for c in whole_calls] == [
            (c["id"], c["function"]["name"]) for c in heads
        ]
        assert [c["finish_reason"] for c in shown][-1] == whole["finish_reason"]
        tokens = [token for c in shown for token in (c["logprobs"] or {"content": []})["content"]]
        assert tokens == (whole["logprobs"] or {"content": []})["content"]
    if view.include_usage:
        assert frames[-1]["usage"] == body["usage"]


@given(case=rich_logs())
def test_responses_numbers_its_events_and_ends_in_the_whole_response(case: Case) -> None:
    view, log = case
    events = read(wire("openai.responses", view, log))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    fold = BY_NAME["openai.responses"].whole("ab", view)
    for entry in log:
        fold.feed(entry)
    assert events[-1]["response"] == json.loads(fold.body())
    assert [event["type"] for event in events].count("response.created") == 1
    terminal = {"response.completed", "response.incomplete", "response.failed"}
    assert [event["type"] in terminal for event in events] == [False] * (len(events) - 1) + [True]


@given(case=rich_logs())
def test_responses_events_put_together_are_its_output(case: Case) -> None:
    """Items open once, close once, in between only grow, and come to what the last event says."""
    view, log = case
    events = read(wire("openai.responses", view, log))
    texts: dict[int, str] = {}
    closed: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.get("output_index", -1)
        if event["type"] == "response.output_item.added":
            assert index == len(texts)
            texts[index] = ""
        elif event["type"].endswith(".delta"):
            assert index not in closed
            texts[index] += event["delta"]
        elif event["type"] == "response.output_item.done":
            assert index not in closed
            closed[index] = event["item"]
    output = events[-1]["response"]["output"]
    assert [_text(item) for item in output] == [texts[index] for index in range(len(texts))]
    assert all(output[index] == item for index, item in closed.items())
    deltas = deltas_of(log, 0)
    said = {kind: "".join(_text(item) for item in output if item["type"] == kind) for kind in ("message", "reasoning")}
    assert said["message"] == "".join(delta.text for delta in deltas)
    assert said["reasoning"] == "".join(delta.reasoning or "" for delta in deltas)
    assert [item["arguments"] for item in output if item["type"] == "function_call"] == arguments_of(deltas)
    if ended(log).status == "done":
        assert len(closed) == len(output) > 0
        [reason] = [e.reason for entry in log for e in entry.events if isinstance(e, Finished) and e.choice == 0]
        assert events[-1]["response"]["status"] == ("incomplete" if reason == "length" else "completed")


def _text(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])
