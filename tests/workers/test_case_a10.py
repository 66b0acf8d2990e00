"""Case A10: whatever reads a server's stream gets the same events wherever the network has cut its bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.errors import EngineFailed
from headrace.workers.engines import remote_frames
from headrace.workers.engines.remote_frames import Event, Frames, LineFrames, SseFrames

BODY = (
    'data: {"content":"é😀"}\r\n\r\n'
    'data: {"content":"B"}\n\n'
    ":c\n"
    'data: {"content":"C"}\r\r'
).encode()  # fmt: skip
TEXTS = ["é😀", "B", "C"]


def fed(frames: Frames, *chunks: bytes) -> list[Event]:
    return [event for chunk in chunks for event in frames.feed(chunk)]


def texts(events: list[Event]) -> list[str]:
    return [json.loads(event.data)["content"] for event in events]


@pytest.mark.parametrize("cut", range(len(BODY) + 1))
def test_a10_every_cut_in_two_gives_the_same_events(cut: int) -> None:
    assert texts(fed(SseFrames(), BODY[:cut], BODY[cut:])) == TEXTS


def test_a10_one_byte_at_a_time_gives_the_same_events() -> None:
    assert texts(fed(SseFrames(), *(BODY[i : i + 1] for i in range(len(BODY))))) == TEXTS


@given(st.lists(st.integers(0, len(BODY)), max_size=12).map(sorted))
def test_a10_any_cuts_give_the_same_events(cuts: list[int]) -> None:
    ends = [*cuts, len(BODY)]
    chunks = [BODY[start:end] for start, end in zip([0, *cuts], ends, strict=True)]
    assert texts(fed(SseFrames(), *chunks)) == TEXTS


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a10_two_data_lines_are_one_event_wherever_they_are_cut(end: str) -> None:
    body = f"data: a{end}data: b{end}{end}data: c{end}{end}".encode()
    for cut in range(len(body) + 1):
        assert fed(SseFrames(), body[:cut], b"", body[cut:]) == [Event(b"a\nb"), Event(b"c")]


def test_a10_a_byte_order_mark_is_ignored_once() -> None:
    body = b"\xef\xbb\xbfdata: a\n\ndata: \xef\xbb\xbfb\n\n"
    for cut in range(len(body)):
        assert [e.data for e in fed(SseFrames(), body[:cut], body[cut:])] == [b"a", b"\xef\xbb\xbfb"]


def test_a10_fields_are_read_as_the_standard_says() -> None:
    body = b"data:no space\n\ndata:  two\n\ndata: a\ndata: b\n\nevent: error\ndata: x\nid: 7\n\ndata\n\nevent: e\n\n"
    assert fed(SseFrames(), body) == [
        Event(b"no space"),
        Event(b" two"),
        Event(b"a\nb"),
        Event(b"x", "error"),
        Event(b""),
    ]


def test_a10_what_is_not_closed_is_no_event() -> None:
    assert fed(SseFrames(), b"data: whole\n\ndata: [DONE]\n") == [Event(b"whole")]
    assert fed(SseFrames(), b"data: whole\n\ndata: [DO") == [Event(b"whole")]
    assert fed(LineFrames(), b'{"a":1}\n{"done":true}') == [Event(b'{"a":1}')]


def test_a10_lines_of_json_end_with_a_line_feed_and_nothing_else() -> None:
    body = '{"t":"a\u2028b\u0085c"}\n\n{"t":"😀"}\r\n'.encode()
    for cut in range(len(body)):
        events = fed(LineFrames(), body[:cut], body[cut:])
        assert [json.loads(event.data)["t"] for event in events] == ["a\u2028b\u0085c", "😀"]


@pytest.mark.parametrize("frames", [SseFrames, LineFrames])
def test_an_event_without_an_end_is_a_failure(frames: type[Frames], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_frames, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EngineFailed):
        fed(frames(), *[b"data: xxxxxxxxxx"] * 10)
