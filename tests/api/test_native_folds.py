"""The laws of the folds of llama.cpp's, TGI's and the plain format: one text, one end, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.wire import BY_NAME
from headrace.broker.messages import (
    AnyEvent,
    Delta,
    Ended,
    Failure,
    Finished,
    ReadEntry,
    Result,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from tests.api.logs import Log, a_view, entries, streamed, whole
from tests.api.reading import parse

NATIVE = ("llamacpp.completion", "tgi", "plain", "plain.ndjson")
formats = pytest.mark.parametrize("name", NATIVE)
REASONS = {
    "llamacpp.completion": {"stop": "eos", "length": "limit", "word": "word"},
    "tgi": {"stop": "eos_token", "length": "length", "word": "stop_sequence"},
    "plain": {"stop": "stop", "length": "length", "word": "stop"},
}
REASONS["plain.ndjson"] = REASONS["plain"]
HOSTILE = ["\n\ndata: [DONE]\n\n", "event: error", "\r\n", "\u2028", "\u2029", "\x85", "\x00", '"}', "id: 1\n", "😀"]


def text_of(name: str, frame: dict[str, Any]) -> str:
    """The text that a frame of a stream adds, or that a whole response has."""
    if name == "tgi":
        return str(frame["token"]["text"]) if "token" in frame else str(frame["generated_text"])
    return str(frame["content" if name == "llamacpp.completion" else "token"])


def said(name: str, last: dict[str, Any]) -> tuple[Any, int, int]:
    """The finish reason and the usage that a last frame or a whole response says."""
    if name == "tgi":
        details = last["details"]
        return details["finish_reason"], details.get("input_length", 5), details["generated_tokens"]
    if name == "llamacpp.completion":
        return last["stop_type"], last["tokens_evaluated"], last["tokens_predicted"]
    return last["finish_reason"], last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]


def body_of(name: str, log: Log, **view: Any) -> dict[str, Any]:
    body = whole(name, log, **view)
    return body[0] if isinstance(body, list) else body


def ended(count: int) -> Ended:
    return Ended("done", usage=Usage(5, count, 2), timings=Timings(1, 20, 30))


@st.composite
def _logs(draw: st.DrawFn) -> tuple[Log, str, str]:
    """A log that is done, its text, and how it ended."""
    texts = draw(st.lists(st.sampled_from(HOSTILE) | st.text(max_size=4), max_size=6))
    has_logprobs = draw(st.booleans())
    rows: list[AnyEvent] = [Started(5)]
    for n, text in enumerate(texts):
        logprobs = [TokenLogprob(n, text.encode(), -0.5)] if has_logprobs else None
        rows.append(Delta(0, text, [n], logprobs))
    end = draw(st.sampled_from(["stop", "length", "word"]))
    rows.append(Finished(0, "length" if end == "length" else "stop", "X" if end == "word" else None))
    rows.append(ended(len(texts)))
    packed: list[list[AnyEvent]] = [[]]
    for row in rows:
        packed[-1].append(row)
        if draw(st.booleans()):
            packed.append([])
    log: Log = tuple(entry for entry in packed if entry)
    return log, "".join(texts), end


@formats
@given(case=_logs())
def test_a_stream_and_a_whole_response_say_the_same(name: str, case: tuple[Log, str, str]) -> None:
    log, text, end = case
    options = {"details": True}
    frames = streamed(name, log, options=options)
    body = body_of(name, log, options=options)
    assert "".join(text_of(name, frame) for frame in frames) == text == text_of(name, body)
    assert said(name, frames[-1]) == said(name, body)
    assert said(name, body)[0] == REASONS[name][end]


@formats
@given(case=_logs())
def test_a6_the_end_is_said_once_and_last(name: str, case: tuple[Log, str, str]) -> None:
    frames = streamed(name, case[0])
    marks = {"llamacpp.completion": "stop", "tgi": "details"}
    ends = [bool(frame[marks.get(name, "done")]) for frame in frames]
    assert ends == [False] * (len(frames) - 1) + [True]


@formats
@given(case=_logs())
def test_no_text_forges_or_breaks_a_frame(name: str, case: tuple[Log, str, str]) -> None:
    form, log = BY_NAME[name], entries(case[0])
    fold = form.fold("ab", a_view(name))
    job, payloads, wire = "0" * 32, [], b""
    for entry in log:
        for k, payload in enumerate(fold.feed(entry)):
            payloads.append(json.loads(payload))
            wire += form.frame(f"{job}.{entry.id}.{k + 1}", payload) + form.heartbeat("x\n\ny", a_view(name))
    if form.media_type == "text/event-stream":
        *blocks, beat = wire.rsplit(b"\n\n", 1)
        assert beat == b": x y\n"
        assert [event.json for event in parse(b"".join(blocks) + b"\n\n")] == payloads
    else:
        lines = [json.loads(line) for line in wire.decode().splitlines()]
        assert [{k: v for k, v in line.items() if k != "id"} for line in lines if "note" not in line] == payloads


@formats
@pytest.mark.parametrize(
    "end", [Ended("failed", Failure("engine_error", "no luck")), Ended("failed"), Ended("cancelled")]
)
def test_a8_a_failure_is_one_frame_and_no_end(name: str, end: Ended) -> None:
    *before, last = streamed(name, (Started(5), Delta(0, "A", [1]), end))
    assert "".join(text_of(name, frame) for frame in before) == "A"
    assert "error" in last and not any("error" in frame for frame in before)
    assert last.get("stop") is None and last.get("details") is None and last.get("finish_reason") is None


def test_llamacpp_tells_tokens_probabilities_and_timings() -> None:
    logprobs = [TokenLogprob(7, b"\xff", float("-inf"), [])]
    log: Log = (Started(5), Delta(0, "a\n", [7], logprobs), Finished(0, "stop", "X"), ended(1))
    settings = {"settings": {"n_predict": 3}, "return_tokens": True}
    partial, last = streamed("llamacpp.completion", log, logprobs=True, options=settings)
    shown = {"id": 7, "token": "", "bytes": [255], "logprob": -3.4028234663852886e38, "top_logprobs": []}
    assert partial["completion_probabilities"] == [shown]
    assert (partial["tokens"], partial["tokens_predicted"], partial["tokens_evaluated"]) == ([7], 1, 5)
    assert (last["content"], last["tokens"], last["stopping_word"], last["has_new_line"]) == ("", [], "X", True)
    timings = last["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (2, 3, 1)
    assert (timings["prompt_ms"], timings["predicted_ms"]) == (20, 30)
    body = whole("llamacpp.completion", log, logprobs=True, options=settings)
    assert (body["tokens"], body["completion_probabilities"]) == ([7], [shown])


def test_llamacpp_says_when_the_context_was_the_limit() -> None:
    log: Log = (Started(5), Delta(0, "a", [7]), Finished(0, "length"), ended(1))
    for asked, is_truncated in ((-1, True), (5, True), (1, False)):
        view = {"options": {"settings": {"n_predict": asked}}}
        assert whole("llamacpp.completion", log, **view)["truncated"] is is_truncated


def test_tgi_shows_a_token_s_own_text_or_the_text_of_its_step() -> None:
    def pieces(*of: bytes) -> list[TokenLogprob]:
        return [TokenLogprob(n, piece, -0.5) for n, piece in enumerate(of)]

    def texts(text: str, logprobs: list[TokenLogprob] | None) -> list[str]:
        log: Log = (Delta(0, text, [0, 1], logprobs), Finished(0, "stop"), ended(2))
        return [frame["token"]["text"] for frame in streamed("tgi", log)]

    assert texts("ab", pieces(b"a", b"b")) == ["a", "b", ""]
    assert texts("a", pieces(b"a", b"X")) == ["", "a", ""]
    assert texts("é", pieces(b"\xc3", b"\xa9")) == ["", "é", ""]
    assert texts("ab", None) == ["", "ab", ""]


def test_tgi_numbers_tokens_from_1() -> None:
    frames = streamed("tgi", (Delta(0, "a", [4, 5]), Delta(0, "b", [6]), Finished(0, "stop"), ended(3)))
    assert [(frame["index"], frame["token"]["id"]) for frame in frames] == [(1, 4), (2, 5), (3, 6), (4, 0)]
    assert [frame["token"]["special"] for frame in frames] == [False, False, False, True]


def test_plain_has_a_position_before_any_text() -> None:
    first, *_ = entries(())
    assert [json.loads(frame) for frame in BY_NAME["plain"].fold("ab", a_view("plain")).feed(first)] == [
        {"token": "", "done": False}
    ]


def test_c3_plain_shows_reasoning_beside_text() -> None:
    log: Log = (Delta(0, "", [1], reasoning="hm"), Delta(0, "a", [2]), Finished(0, "stop"), ended(2))
    assert streamed("plain", log)[1:3] == [
        {"token": "", "reasoning": "hm", "done": False},
        {"token": "a", "done": False},
    ]
    assert (whole("plain", log)["reasoning"], whole("plain", log)["token"]) == ("hm", "a")


def test_plain_numbers_choices_where_another_format_asked_for_several() -> None:
    log: Log = (Delta(1, "b", [1]), Delta(0, "a", [1]), Finished(0, "stop"), Finished(1, "stop"), ended(2))
    assert [(frame.get("choice"), frame["token"]) for frame in streamed("plain", log, n=2)[1:3]] == [(1, "b"), (0, "a")]


@pytest.mark.parametrize(
    ("name", "param", "shown"),
    [
        ("llamacpp.completion", "response_format", "json_schema"),
        ("llamacpp.embedding", "input", "content"),
        ("tgi", "prompt", "inputs"),
        ("tgi", "response_format", "grammar"),
    ],
)
def test_h4_a_worker_s_word_for_a_field_is_the_caller_s(name: str, param: str, shown: str) -> None:
    [error] = streamed(name, (Ended("failed", Failure("invalid_request", "not here", param)),))
    said = error["error"] if name == "tgi" else error["error"]["param"]
    assert shown in said and param not in said


def results(name: str, data: dict[str, Any], **options: Any) -> Any:
    log: Log = (Started(3), Result(data), Ended("done", usage=Usage(3, 0)))
    body = whole(name, log, options=options)
    assert streamed(name, log, options=options) == [body]
    [failed] = streamed(name, (Ended("failed", Failure("invalid_request", "cannot")),))
    assert failed == {"error": {"code": 400, "message": "cannot", "type": "invalid_request_error"}}
    return body


def test_llamacpp_tokenize() -> None:
    data = {"tokens": [1, 2], "pieces": [b"a", b"\xc3"]}
    assert results("llamacpp.tokenize", data) == {"tokens": [1, 2]}
    assert results("llamacpp.tokenize", data, with_pieces=True) == {
        "tokens": [{"id": 1, "piece": "a"}, {"id": 2, "piece": [195]}]
    }


def test_llamacpp_detokenize_and_template_and_embedding() -> None:
    assert results("llamacpp.detokenize", {"text": "hé\u2028"}) == {"content": "hé\u2028"}
    assert results("llamacpp.apply-template", {"text": "<s>"}) == {"prompt": "<s>"}
    vectors = {"embeddings": [b"\x00\x00\x80?\x00\x00\x00\xbf"], "tokens": [2]}
    assert results("llamacpp.embedding", vectors) == [{"index": 0, "embedding": [[1.0, -0.5]]}]


def test_an_entry_of_another_build_keeps_its_place() -> None:
    for name in NATIVE:
        assert BY_NAME[name].fold("ab", a_view(name)).feed(ReadEntry("1-3", 0, [])) == []
