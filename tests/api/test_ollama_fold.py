"""Ollama's chat, generate and embeddings: what is said, line by line."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.api.wire import BY_NAME
from headrace.broker.messages import (
    Alternative,
    Delta,
    Ended,
    Failure,
    Finished,
    Result,
    Started,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Unknown,
    Usage,
)
from tests.api.logs import Log, a_view, entries, streamed, whole
from tests.api.spoken import CHAT, GENERATE, Spoken, of_lines, of_object, read_lines

DONE = Ended("done", usage=Usage(7, 2, 3), timings=Timings(1, 2, 3))
MEASURED = {
    "total_duration": 6_000_000,
    "load_duration": 1_000_000,
    "prompt_eval_count": 7,
    "prompt_eval_duration": 2_000_000,
    "eval_count": 2,
    "eval_duration": 3_000_000,
}
MESSAGE = "The engine failed while it worked on this request."
formats = pytest.mark.parametrize("form", [CHAT, GENERATE], ids=["chat", "generate"])


def _message(text: str, **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text, **more}}


def _response(text: str, **more: Any) -> dict[str, Any]:
    return {"response": text, **more}


def _members(frame: dict[str, Any]) -> dict[str, Any]:
    return {name: frame[name] for name in frame.keys() & {"message", "response", "thinking"}}


SHAPES = {"ollama.chat": _message, "ollama.generate": _response}


@formats
def test_h13_a_stream_is_chunks_and_one_that_is_done(form: Spoken) -> None:
    shape = SHAPES[form.name]
    log: Log = (Started(7), Delta(0, "A", [1]), Delta(0, "", [2]), Delta(0, "B", [3]), [Finished(0, "stop"), DONE])
    stamps = ["2023-11-14T22:13:21.002Z", "2023-11-14T22:13:21.004Z", "2023-11-14T22:13:21.005Z"]
    heads = [{"model": "m", "created_at": stamp} for stamp in stamps]
    end = {"done": True, "done_reason": "stop", **MEASURED}
    assert streamed(form.name, log) == [
        {**heads[0], **shape("A"), "done": False},
        {**heads[1], **shape("B"), "done": False},
        {**heads[2], **shape(""), **end},
    ]
    assert whole(form.name, log) == {**heads[2], **shape("AB"), **end}


@formats
def test_the_model_has_the_name_that_was_asked_for(form: Spoken) -> None:
    log: Log = (Started(7), Delta(0, "A", [1]), Delta(0, "", [2], reasoning="r"), Finished(0, "stop"), DONE)
    frames = streamed(form.name, log, options={"asked": "m:latest"})
    assert {frame["model"] for frame in frames} == {"m:latest"}


@formats
@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (Finished(0, "stop"), "stop"),
        (Finished(0, "length"), "length"),
        (Finished(0, "stop", "S"), "stop"),
        (Finished(0, "tool_calls"), "stop"),
    ],
)
def test_a6_h13_the_reason_is_in_the_last_object_only(form: Spoken, finish: Finished, reason: str) -> None:
    log: Log = (Started(7), [Delta(0, "A", [1]), finish], DONE)
    assert of_lines(streamed(form.name, log)).reason == of_object(whole(form.name, log)).reason == reason


@formats
def test_h13_the_whole_time_holds_its_parts_and_the_waiting(form: Spoken) -> None:
    for timings, total_ms in ((Timings(1, 2, 30), 33), (Timings(0, 1, 1), 4), (None, 4)):
        body = whole(form.name, (Started(7), Finished(0, "stop"), Ended("done", usage=Usage(7, 2), timings=timings)))
        assert body["total_duration"] == total_ms * 1_000_000
        assert body["total_duration"] >= sum(body[f"{part}_duration"] for part in ("load", "prompt_eval", "eval"))


def test_c1_calls_are_said_at_once_with_an_object() -> None:
    calls = [
        Delta(0, "", [1], tool_calls=[ToolCallDelta(0, "call_1", "f")]),
        Delta(0, "", [2], tool_calls=[ToolCallDelta(0, arguments='{"a":1}'), ToolCallDelta(1, "call_2", "g")]),
    ]
    shown = [
        {"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}},
        {"id": "call_2", "function": {"index": 1, "name": "g", "arguments": {}}},
    ]
    log: Log = (Started(7), *calls, Finished(0, "tool_calls"), DONE)
    chunk, last = streamed("ollama.chat", log)
    assert chunk["message"] == whole("ollama.chat", log)["message"]
    assert chunk["message"] == {"role": "assistant", "content": "", "tool_calls": shown}
    assert "tool_calls" not in last["message"]


@pytest.mark.parametrize("arguments", ['{"a', "[1]"])
def test_a_call_that_was_cut_off_is_not_said(arguments: str) -> None:
    calls = [ToolCallDelta(0, "1", "f", "{}"), ToolCallDelta(1, "2", "g", arguments)]
    log: Log = (Started(7), Delta(0, "", [1], tool_calls=calls), Finished(0, "length"), DONE)
    [call] = whole("ollama.chat", log)["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert streamed("ollama.chat", log)[0]["message"]["tool_calls"] == [call]


@formats
def test_c3_thinking_is_a_field_of_its_own(form: Spoken) -> None:
    shape = SHAPES[form.name]
    log: Log = (Started(7), Delta(0, "a", [1], reasoning="r1"), Delta(0, "b", [2], reasoning=""), DONE)
    said = list(map(_members, streamed(form.name, log)))
    assert said == [shape("", thinking="r1"), shape("a"), shape("b"), shape("")]
    assert _members(whole(form.name, log)) == shape("ab", thinking="r1")


@formats
def test_log_probabilities_go_out_with_their_text(form: Spoken) -> None:
    token = TokenLogprob(1, b"A", -0.5, [Alternative(2, b"\xff", -math.inf)])
    log: Log = (Started(7), Delta(0, "A", [1], [token]), Delta(0, "", [2], [token]), Finished(0, "length"), DONE)
    other = {"token": "\ufffd", "logprob": -9999.0, "bytes": [255]}
    shown = {"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": [other]}
    chunk, last = streamed(form.name, log, logprobs=True)
    assert (chunk["logprobs"], last["logprobs"]) == ([shown], [shown])
    assert whole(form.name, log, logprobs=True)["logprobs"] == [shown, shown]
    assert "logprobs" not in whole(form.name, log)


@formats
@pytest.mark.parametrize(
    "end", [Ended("failed", Failure("engine_error", "broken", "think")), Ended("cancelled"), Ended("failed")]
)
def test_a8_an_error_is_the_last_line(form: Spoken, end: Ended) -> None:
    *chunks, last = streamed(form.name, (Started(7), Delta(0, "A", [1]), end))
    assert form.error(last) in ("think: broken", "The request was cancelled.", MESSAGE)
    assert not any(chunk["done"] for chunk in chunks)


@pytest.mark.parametrize(
    ("name", "param", "message"),
    [
        ("ollama.chat", "response_format", "format: no"),
        ("ollama.chat", "messages", "messages: no"),
        ("ollama.generate", "messages", "prompt: no"),
        ("ollama.embed", "input", "input: no"),
        ("ollama.embeddings", "input", "prompt: no"),
        ("ollama.embeddings", None, "no"),
    ],
)
def test_fields_have_the_names_that_the_caller_knows(name: str, param: str | None, message: str) -> None:
    end = Ended("failed", Failure("invalid_request", "no", param))
    assert streamed(name, (end,)) == [{"error": message}]


@formats
def test_a3_a_heartbeat_is_a_chunk_that_says_nothing(form: Spoken) -> None:
    beat = BY_NAME[form.name].heartbeat("queued,\n\n1 before", a_view(form.name))
    assert beat.endswith(b"}\n") and beat.count(b"\n") == 1
    assert read_lines(beat) == []


# -- embeddings -------------------------------------------------------------------------------------------------------


def _embedded(*vectors: list[float]) -> Log:
    packed = [struct.pack(f"<{len(each)}f", *each) for each in vectors]
    result = Result({"embeddings": packed, "tokens": [1] * len(vectors)})
    return ([Started(7), result], Ended("done", usage=Usage(7, 0), timings=Timings(1, 2, 0)))


def test_embeddings_have_length_one_and_stand_in_order() -> None:
    log = _embedded([3.0, 4.0], [0.0, 0.0])
    body = whole("ollama.embed", log)
    measured = {"total_duration": 3_000_000, "load_duration": 1_000_000, "prompt_eval_count": 7}
    assert body == {"model": "m", "embeddings": [[0.6, 0.8], [0.0, 0.0]], **measured}
    assert streamed("ollama.embed", log) == [body]
    cut = whole("ollama.embed", log, options={"dimensions": 1})
    assert cut["embeddings"] == [[1.0], [0.0]]


def test_the_older_route_says_one_embedding_as_it_is() -> None:
    log = _embedded([3.0, 4.0])
    assert whole("ollama.embeddings", log) == {"embedding": [3.0, 4.0]}
    assert streamed("ollama.embeddings", log) == [{"embedding": [3.0, 4.0]}]


@pytest.mark.parametrize("name", ["ollama.embed", "ollama.embeddings"])
def test_embeddings_that_are_not_there_are_an_error(name: str) -> None:
    [frame] = streamed(name, (Ended("done"),))
    assert frame == {"error": "there are no embeddings"}
    [frame] = streamed(name, (Ended("failed", Failure("invalid_request", "this model cannot embed")),))
    assert frame == {"error": "this model cannot embed"}


# -- laws -------------------------------------------------------------------------------------------------------------

_texts = st.sampled_from(["", "x", '"}\n{"done":true}\n', "\r\n", "\u2028", "\u2029", "\u0085", "\0", "}{", "😀"])
_calls = st.lists(st.builds(ToolCallDelta, st.integers(0, 2), st.just("c"), st.just("f"), _texts), max_size=2)
_logprobs = st.none() | st.just([TokenLogprob(1, b"\xe2\x80\xa8", -1.0)])
_deltas = st.builds(
    lambda text, logprobs, reasoning, calls: Delta(0, text, [1], logprobs, reasoning, calls),
    *(_texts, _logprobs, st.none() | _texts, _calls),
)
_ends = st.builds(Finished, st.just(0), st.sampled_from(["stop", "length", "tool_calls"]), st.none() | st.just("S"))
_logs = st.builds(
    lambda deltas, end: (Started(7, 3), *deltas, Unknown(99), end, DONE), st.lists(_deltas, max_size=8), _ends
)


def _joined(frames: list[dict[str, Any]], name: str) -> Any:
    """What all chunks say of one thing, put together."""
    parts = [each for frame in frames if (each := frame.get("message", frame).get(name) or frame.get(name))]
    empty: Any = "" if name == "thinking" else []
    return sum(parts, empty) if empty == [] else "".join(parts)


@formats
@settings(deadline=None)
@given(log=_logs, logprobs=st.booleans())
def test_a_stream_and_a_whole_response_agree(form: Spoken, log: Log, logprobs: bool) -> None:
    frames, body = streamed(form.name, log, logprobs=logprobs), whole(form.name, log, logprobs=logprobs)
    assert of_lines(frames) == of_object(body)
    for name in ("thinking", "tool_calls", "logprobs"):
        assert _joined(frames, name) == _joined([body], name)
    assert frames[-1]["created_at"] == body["created_at"]
    for name in MEASURED:
        assert frames[-1][name] == body[name]


@formats
@settings(deadline=None)
@given(_logs)
def test_a2_no_text_forges_or_breaks_a_line(form: Spoken, log: Log) -> None:
    wire, view = BY_NAME[form.name], a_view(form.name)
    fold, written, said = wire.fold("ab", view), b"", 0
    for entry in entries(log):
        for payload in fold.feed(entry):
            written += wire.frame(f"{'0' * 32}.{entry.id}", payload) + wire.heartbeat("n\n\n", view)
            said += 1
    frames = read_lines(written)
    assert len(frames) == said and all(frame.id.startswith("0" * 32) for frame in frames)
