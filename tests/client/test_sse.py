"""The parser against the standard's rules, and against every way to cut the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.sse import Event, Parser

STREAM = (
    "\ufeffid: a.1\ndata: one\n\n: a comment\n"
    "event: note\r\nid: a.2\r\ndata: two\r\ndata:  lines\r\n\r\n"
    "data\r\rdata:ü€😀\u2028\rid:a\0b\r\r"
    "retry: 10\nid: a.3\n\n\n"
    "unknown: x\ndata: [DONE]\n\ndata: never ended\n"
).encode()
EVENTS = [
    Event("one", "a.1"),
    Event("two\n lines", "a.2", "note"),
    Event("", "a.2"),
    Event("ü€😀\u2028", "a.2"),
    Event("[DONE]", "a.3"),
]


def parse(*pieces: bytes) -> list[Event]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_a_stream_in_one_piece_gives_its_events() -> None:
    assert parse(STREAM) == EVENTS


def test_a_stream_byte_by_byte_gives_the_same_events() -> None:
    assert parse(*(STREAM[at : at + 1] for at in range(len(STREAM)))) == EVENTS


@given(st.lists(st.integers(0, len(STREAM))))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    assert parse(*(STREAM[a:b] for a, b in pairwise(sorted([0, *cuts, len(STREAM)])))) == EVENTS


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), min_size=1),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.data(),
)
def test_what_was_written_is_read_whatever_the_line_end_and_the_cut(
    texts: list[str], end: str, data: st.DataObject
) -> None:
    written = "".join(f"id: {n}{end}data: {text}{end}{end}" for n, text in enumerate(texts)).encode()
    cut = data.draw(st.integers(0, len(written)))
    assert parse(written[:cut], written[cut:]) == [Event(text, str(n)) for n, text in enumerate(texts)]


def test_an_event_is_told_as_soon_as_its_blank_line_is_there() -> None:
    parser = Parser()
    assert parser.feed(b"data: x\r\n\r") == [Event("x")]
    assert parser.feed(b"\ndata: y\r\n\r\n") == [Event("y")]


@pytest.mark.parametrize("rest", [b"data: x", b"data: x\n", b"id: 1\ndata: x\r\n"])
def test_a_block_without_its_blank_line_is_no_event(rest: bytes) -> None:
    assert parse(b"data: before\n\n" + rest) == [Event("before")]


def test_bytes_that_are_no_utf8_do_not_stop_it() -> None:
    assert parse(b"data: a\xffb\n\n") == [Event("a\ufffdb")]


def test_a_byte_order_mark_counts_only_at_the_start() -> None:
    assert parse(b"\xef\xbb\xbfdata: x\n\n\xef\xbb\xbfdata: y\n\ndata: z\n\n") == [Event("x"), Event("z")]
