"""The text filter: whole characters, nothing of a stop string, no special tokens, wherever tokens are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.engines.protocol import Token
from headrace.workers.text import TextFilter


def run(pieces: list[bytes], stops: list[str] | None = None, special: frozenset[int] = frozenset()) -> list[str]:
    """Feed one token at a time until a stop is found; what came out at each step, and at the end."""
    text_filter = TextFilter(stops or [])
    shown = []
    for index, piece in enumerate(pieces):
        shown.append(text_filter.push([Token(index, piece, index in special)]))
        if text_filter.stop is not None:
            break
    return [*shown, text_filter.flush()]


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def test_b1_a_character_that_is_split_over_tokens_comes_whole() -> None:
    shown = run([b"\xf0\x9f", b"\x98", b"\x80", b" ok", b"\xe6\xad", b"\xaa"])
    assert shown == ["", "", "😀", " ok", "", "歪", ""]


def test_b1_half_a_character_at_the_end_is_dropped() -> None:
    assert "".join(run([b"\xf0\x9f"])) == ""


def test_b1_a_byte_that_is_no_utf8_becomes_one_replacement_character() -> None:
    assert "".join(run([b"a", b"\xff", b"b"])) == "a\ufffdb"


def test_b1_a_family_emoji_of_25_bytes_one_byte_a_token() -> None:
    family = "👨‍👩‍👧‍👦"
    shown = run([bytes([byte]) for byte in family.encode()])
    assert len(family.encode()) == 25
    assert "".join(shown) == family
    assert "\ufffd" not in "".join(shown)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        ([b"ABC", b"DEF", b"G", b"HI", b"J", b"KL"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        ([b"x\n", b"User", b":", b" y"], ["\nUser:"], "x", "\nUser:"),
        ([b"fooST", b"OPbar"], ["STOP"], "foo", "STOP"),
        ([b"aXbY"], ["Y", "X"], "a", "X"),
        ([b"ab", b"c"], ["abcd", "b"], "a", "b"),
    ],
)
def test_b2_nothing_of_a_stop_string_is_ever_shown(pieces: list[bytes], stops: list[str], text: str, stop: str) -> None:
    text_filter = TextFilter(stops)
    shown = ""
    for index, piece in enumerate(pieces):
        shown += text_filter.push([Token(index, piece)])
        assert text.startswith(shown)
        if text_filter.stop is not None:
            break
    assert (shown, text_filter.stop) == (text, stop)
    assert text_filter.flush() == ""


def test_b2_what_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    assert run([b"foo", b"ST"], ["STOP"]) == ["foo", "", "ST"]


def test_b4_special_tokens_make_no_text_and_their_letters_do() -> None:
    assert "".join(run([b"Hi", b"<|im_end|>"], special=frozenset({1}))) == "Hi"
    assert "".join(run([b"Hi", b"<|im", b"_end|>"])) == "Hi<|im_end|>"


@given(st.text(max_size=60), st.lists(st.integers(0, 400), max_size=40))
def test_text_does_not_depend_on_where_tokens_are_cut(text: str, cuts: list[int]) -> None:
    shown = run(split(text.encode(), cuts))
    assert "".join(shown) == text
    assert all(part.encode().decode() == part for part in shown)


@given(
    st.text("abX", max_size=40),
    st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=40),
)
def test_stopped_text_holds_no_stop_string_wherever_tokens_are_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    shown = "".join(run(split(text.encode(), cuts), stops))
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    if not any(stop in text for stop in stops):
        assert shown == text


@given(
    st.lists(st.sampled_from([b"a", b"b", b"X", b"\xf0\x9f", b"\x98\x80", b"\xff", "é".encode(), b""]), max_size=20),
    st.lists(st.text("abX", min_size=1, max_size=3), max_size=2),
    st.integers(0, 20),
)
def test_a_filter_that_is_made_again_from_the_tokens_goes_on_with_the_same_text(
    pieces: list[bytes], stops: list[str], cut: int
) -> None:
    whole = run(pieces, stops)
    seam = min(cut, len(whole) - 1)
    successor = TextFilter(stops)
    for index, piece in enumerate(pieces[:seam]):
        successor.push([Token(index, piece)])
    rest = ""
    for index, piece in enumerate(pieces[seam:]):
        if successor.stop is not None:
            break
        rest += successor.push([Token(index, piece)])
    assert "".join(whole[:seam]) + rest + successor.flush() == "".join(whole)
