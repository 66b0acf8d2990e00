"""Framing, and that a real SDK reads it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from headrace.api.wire import BY_NAME, sse
from headrace.broker.errors import EngineFailed
from headrace.broker.messages import Delta, Ended, Finished, Started, Usage, View
from tests.api.logs import Log, a_view, entries

SEPARATORS = ("\u2028", "\u2029", "\u0085")


def test_a_frame_is_an_id_line_a_data_line_and_a_blank_line() -> None:
    assert sse.frame("ab.1-2", b'{"a":1}') == b'id: ab.1-2\ndata: {"a":1}\n\n'


@pytest.mark.parametrize("note", ["queued", "", "a\nb", "a\r\n\r\ndata: x", "a\u2028b\u0085c"])
def test_a1_a_heartbeat_is_one_comment_line_without_a_blank_line(note: str) -> None:
    beat = sse.heartbeat(note)
    assert beat.startswith(b": ") and beat.endswith(b"\n")
    assert len(beat.decode().splitlines()) == 1 and beat.count(b"\n") == 1 and b"\r" not in beat


@pytest.mark.parametrize("separator", SEPARATORS)
@pytest.mark.parametrize("text", ["a{}b", "{}", "é{0}{0}\\", '"{}"', "\\{}"])
def test_a2_line_separators_are_escaped_and_read_back(separator: str, text: str) -> None:
    value = {text.format(separator): [text.format(separator)]}
    data = sse.encode(value)
    assert json.loads(data) == value
    assert len(data.decode().splitlines()) == 1


def test_a2_other_characters_are_left_as_they_are() -> None:
    assert sse.encode("\u2027\u202a\u00e9\u0084😀") == '"\u2027\u202a\u00e9\u0084😀"'.encode()
    assert sse.encode("g\nh i\r\nj") == rb'"g\nh i\r\nj"'


def _wire(log: Log, name: str = "openai.chat") -> bytes:
    """The stream as a pod would write it, with a heartbeat before, between and after all frames."""
    form = BY_NAME[name]
    fold = form.fold("ab", a_view(name))
    beat = form.heartbeat("queued: 3 before you", View("alice", "m", form.name))
    out = [beat]
    for entry in entries(log):
        for payload in fold.feed(entry):
            out += [form.frame(f"ab.{entry.id}", payload), beat]
    return b"".join([*out, form.terminator])


def _client(body: bytes, step: int = 1 << 20) -> openai.OpenAI:
    """The official client on a server that answers these bytes, `step` at a time."""

    def answer(_: httpx.Request) -> httpx.Response:
        pieces = (body[at : at + step] for at in range(0, len(body), step))
        return httpx.Response(200, headers={"Content-Type": sse.MEDIA_TYPE}, content=pieces)

    # Any: some versions of the SDK are typed for a fork of httpx, and all take httpx itself
    http: Any = httpx.Client(transport=httpx.MockTransport(answer))
    return openai.OpenAI(api_key="none", base_url="http://localhost/v1", http_client=http, max_retries=0)


def _chunks(body: bytes, step: int = 1 << 20) -> list[ChatCompletionChunk]:
    with _client(body, step) as client:
        stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
        return list(stream)


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_a1_the_sdk_reads_a_stream_with_heartbeats_between_all_frames(step: int) -> None:
    texts = ["a\u2028b", "c\u2029d", "e\u0085f", "g\nh", "i\r\nj", "😀"]
    deltas = [Delta(0, text, [1]) for text in texts]
    log: Log = (Started(3), *deltas, Finished(0, "stop"), Ended("done", usage=Usage(3, 6)))
    chunks = _chunks(_wire(log), step)
    assert [chunk.choices[0].delta.content or "" for chunk in chunks] == ["", *texts, ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 7 + ["stop"]
    assert {chunk.id for chunk in chunks} == {"chatcmpl-ab"}


def test_a1_the_sdk_reads_completions_too() -> None:
    log = (Delta(0, "a", [1]), Delta(0, "b", [2]), Finished(0, "length"), Ended("done", usage=Usage(3, 2)))
    with _client(_wire(log, "openai.completions")) as client:
        chunks = list(client.completions.create(model="m", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "ab"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


@pytest.mark.parametrize("blank", [b": ping\n\n", b"data:\n\n"])
def test_a1_the_sdk_would_break_on_other_heartbeats(blank: bytes) -> None:
    """If this fails, the SDK was mended; the form we use is right all the same."""
    broken = _wire((Delta(0, "a", [1]),)).replace(b": queued: 3 before you\n", blank)
    with pytest.raises(json.JSONDecodeError):
        _chunks(broken)


@pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if form.terminator])
def test_a4_a_stream_ends_in_one_done_marker(name: str) -> None:
    body = _wire((Delta(0, "[DONE]", [1]), Ended("failed")), name)
    assert body.endswith(b"\ndata: [DONE]\n\n")
    assert body.split(b"\n").count(b"data: [DONE]") == 1


def test_a8_the_sdk_raises_the_message_of_a_failed_job() -> None:
    with pytest.raises(openai.APIError, match=EngineFailed().message):
        _chunks(_wire((Delta(0, "A", [1]), Ended("failed"))))
