"""The laws of a fold, for logs that nobody would write by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.wire import BY_NAME
from headrace.broker.messages import (
    Alternative,
    AnyEvent,
    Claimed,
    Delta,
    Ended,
    Failure,
    Finished,
    Queued,
    ReadEntry,
    Started,
    TokenLogprob,
    Unknown,
    Usage,
    View,
)

formats = pytest.mark.parametrize("name", list(BY_NAME))
openai = pytest.mark.parametrize("name", [name for name in BY_NAME if name in ("openai.chat", "openai.completions")])
"""Laws that read a frame's choices; those of other families are read in their own modules."""

_texts = st.one_of(
    st.just(""),
    st.sampled_from(["\u2028", "\u2029", "a\u0085", "\r\n", '"', "\\", "😀", "data: [DONE]\n\n"]),
    st.text(max_size=5),
)
_floats = st.floats(max_value=0, allow_nan=False)
_tops = st.lists(st.builds(Alternative, st.just(1), st.binary(max_size=3), _floats), max_size=2)
_logprobs = st.lists(st.builds(TokenLogprob, st.just(1), st.binary(max_size=4), _floats, _tops), min_size=1, max_size=2)
_unknown = st.builds(Unknown, st.integers(6, 99))


@st.composite
def _steps(draw: st.DrawFn, choices: int) -> list[list[AnyEvent]]:
    """What engine steps make of some choices: each gets deltas, then its finish; one entry holds one or more events."""
    rows: list[list[AnyEvent]] = []
    for choice in range(choices):
        deltas = st.builds(Delta, st.just(choice), _texts, st.just([1]), st.none() | _logprobs)
        ends = [Finished(choice, "stop"), Finished(choice, "length"), Finished(choice, "stop", "STOP")]
        rows.append([*draw(st.lists(deltas, max_size=5)), draw(st.sampled_from(ends))])
    entries: list[list[AnyEvent]] = [[]]
    while any(rows):
        row = draw(st.sampled_from([row for row in rows if row]))
        entries[-1].append(row.pop(0))
        if draw(st.booleans()):
            entries.append([])
        elif draw(st.integers(0, 3)) == 0:
            entries[-1].append(draw(_unknown))
    return [entry for entry in entries if entry]


@st.composite
def _logs(draw: st.DrawFn, *, is_done: bool | None = None) -> tuple[View, list[ReadEntry]]:
    """A log of one to three attempts; `is_done` None lets it also fail, or be cancelled, at any point."""
    view = View("o", draw(st.sampled_from(["m", "é\u2028"])), "f", n=draw(st.integers(1, 3)), stream=True)
    view = View(
        *(view.owner, view.model, view.format, view.band, view.n, view.stream),
        include_usage=draw(st.booleans()),
        logprobs=draw(st.booleans()),
    )
    body: list[list[AnyEvent]] = [[Claimed("w", "0-1")], [Started(5)], *draw(_steps(view.n))]
    for attempt in range(draw(st.integers(0, 2))):
        at = draw(st.integers(2, len(body)))
        body[at:at] = [[Claimed(f"w{attempt}", "1-1")], [Started(5, 5)]]
    end = Ended("done", usage=Usage(5, 7, 2))
    if is_done is None and draw(st.booleans()):
        end = draw(st.sampled_from([Ended("failed", Failure("engine_error")), Ended("cancelled"), Ended("failed")]))
        body = body[: draw(st.integers(0, len(body)))]
    packed: list[list[AnyEvent]] = [[Queued(draw(st.integers(0, 2**41)))], *body, [end]]
    return view, [ReadEntry(f"1-{n}", n, events) for n, events in enumerate(packed)]


def _feed(name: str, view: View, log: list[ReadEntry]) -> list[list[bytes]]:
    fold = BY_NAME[name].fold("ab", view)
    return [fold.feed(entry) for entry in log]


def _choices(frames: list[list[bytes]], index: int) -> list[dict[str, Any]]:
    read = [json.loads(frame) for made in frames for frame in made]
    return [choice for frame in read for choice in frame.get("choices", []) if choice["index"] == index]


def _text(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])


@formats
@given(case=_logs(), cut=st.integers(0, 40))
def test_a_reader_that_comes_back_gets_the_tail_of_the_same_stream(
    name: str, case: tuple[View, list[ReadEntry]], cut: int
) -> None:
    view, log = case
    undisturbed = _feed(name, view, log)
    again = BY_NAME[name].fold("ab", view)
    for entry in log[:cut]:
        again.feed(entry)
    assert [again.feed(entry) for entry in log[cut:]] == undisturbed[cut:]
    assert _feed(name, view, log[:cut]) == undisturbed[:cut]


@formats
@given(case=_logs())
def test_a2_every_frame_is_json_on_one_line(name: str, case: tuple[View, list[ReadEntry]]) -> None:
    frames = [frame for made in _feed(name, *case) for frame in made]
    for frame in frames:
        assert isinstance(json.loads(frame), dict | list)
        assert len(frame.decode().splitlines()) == 1


@openai
@given(case=_logs())
def test_the_joined_content_is_the_joined_text_of_the_log(name: str, case: tuple[View, list[ReadEntry]]) -> None:
    view, log = case
    frames = _feed(name, view, log)
    deltas = [event for entry in log for event in entry.events if isinstance(event, Delta)]
    for index in range(view.n):
        said = "".join(map(_text, _choices(frames, index)))
        assert said == "".join(delta.text for delta in deltas if delta.choice == index)


@openai
@given(case=_logs())
def test_a8_an_end_is_said_once(name: str, case: tuple[View, list[ReadEntry]]) -> None:
    view, log = case
    frames = _feed(name, view, log)
    end = log[-1].events[-1]
    assert isinstance(end, Ended)
    errors = [frame for made in frames for frame in made if "error" in json.loads(frame)]
    assert errors == ([] if end.status == "done" else frames[-1])
    assert len(frames[-1]) == (view.include_usage if end.status == "done" else 1)


@openai
@given(case=_logs(is_done=True))
def test_a6_each_choice_of_a_job_that_is_done_has_one_finish_and_it_is_last(
    name: str, case: tuple[View, list[ReadEntry]]
) -> None:
    view, log = case
    frames = _feed(name, view, log)
    for index in range(view.n):
        reasons = [choice["finish_reason"] for choice in _choices(frames, index)]
        assert reasons[-1] in ("stop", "length") and not any(reasons[:-1])
    *usages, last = [json.loads(frame).get("usage", "absent") for made in frames for frame in made]
    assert all(usage == (None if view.include_usage else "absent") for usage in usages)
    assert isinstance(last, dict) if view.include_usage else last == "absent"


def _joined_logprobs(name: str, choices: list[dict[str, Any]]) -> dict[str, Any] | None:
    shown = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    lists = ("content",) if name == "openai.chat" else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {key: [each for part in shown for each in part[key]] for key in lists} if shown else None


@openai
@given(case=_logs(is_done=True))
def test_a_stream_and_a_whole_response_agree(name: str, case: tuple[View, list[ReadEntry]]) -> None:
    view, log = case
    frames = _feed(name, view, log)
    whole = BY_NAME[name].whole("ab", view)
    for entry in log:
        whole.feed(entry)
    body = json.loads(whole.body())
    assert [choice["index"] for choice in body["choices"]] == list(range(view.n))
    for choice in body["choices"]:
        streamed = _choices(frames, choice["index"])
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        assert text == "".join(map(_text, streamed))
        assert choice["finish_reason"] == streamed[-1]["finish_reason"]
        assert _joined_logprobs(name, [choice]) == _joined_logprobs(name, streamed)
    first = json.loads(next(frame for made in frames for frame in made))
    assert all(first[key] == body[key] for key in ("id", "created", "model"))
    if view.include_usage:
        assert json.loads(frames[-1][-1])["usage"] == body["usage"]


@given(case=_logs(is_done=True))
def test_every_log_probability_is_shown_unless_a_stop_string_took_it(case: tuple[View, list[ReadEntry]]) -> None:
    view, log = case
    frames = _feed("openai.chat", view, log)
    events = [event for entry in log for event in entry.events]
    for index in range(view.n):
        deltas = [event for event in events if isinstance(event, Delta) and event.choice == index]
        (finish,) = [event for event in events if isinstance(event, Finished) and event.choice == index]
        while finish.stop and deltas and not deltas[-1].text:
            deltas.pop()
        pieces = [list(token.piece) for delta in deltas for token in delta.logprobs or []] if view.logprobs else []
        joined = _joined_logprobs("openai.chat", _choices(frames, index)) or {"content": []}
        assert [token["bytes"] for token in joined["content"]] == pieces
