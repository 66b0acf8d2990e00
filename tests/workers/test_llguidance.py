"""The check of grammars that llama.cpp itself does not make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.engines import llguidance
from headrace.workers.engines.llamacpp_grammar import in_slashes, json_rule
from headrace.workers.engines.llguidance import MARK, Llguidance, Matcher


@pytest.fixture(scope="module")
def found() -> Llguidance:
    found = llguidance.find()
    assert found is not None
    return found


def rules(schema: dict[str, object], *, is_lenient: bool = False) -> str:
    return MARK + "start: " + json_rule(schema, is_lenient=is_lenient)


@pytest.mark.parametrize(
    ("grammar", "error"),
    [
        (MARK + "start: /[0-9]{3}/", None),
        (rules({"type": "object"}), None),
        (rules({"oneOf": [{"type": "string"}, {"type": "null"}]}), None),
        (rules({"type": "array", "uniqueItems": True}, is_lenient=True), None),
        (rules({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (rules({"type": "thing"}, is_lenient=True), "Invalid type: thing"),
        (MARK + "start: /(/", "unclosed group"),
        (MARK + "start: nothing", "nothing"),
        (MARK + "start: /a\0/", "NUL"),
    ],
)
def test_it_tells_right_from_wrong_and_why_in_one_line(found: Llguidance, grammar: str, error: str | None) -> None:
    told = found.error(grammar)
    if error is None or told is None:
        assert told is error
    else:
        assert error in told
        assert "\n" not in told
        assert " | " not in told


def test_a_matcher_knows_what_may_come_and_where_it_may_end(found: Llguidance) -> None:
    matcher = Matcher(found, rules({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}))
    assert not matcher.may_end()
    for data in (b'{"', b'a": 1', b"2"):
        assert matcher.accepts(data)
        assert not matcher.may_end()
    assert matcher.accepts(b"}")
    assert matcher.may_end()
    assert not matcher.accepts(b"}")


def test_half_a_character_is_accepted_where_the_whole_one_is(found: Llguidance) -> None:
    matcher = Matcher(found, MARK + "start: /é+/")
    assert matcher.accepts(b"\xc3")
    assert not matcher.may_end()
    assert matcher.accepts(b"\xa9")
    assert matcher.may_end()


@given(st.text("a/\\\n", max_size=6))
def test_a_pattern_between_slashes_ends_where_it_ends(pattern: str) -> None:
    """Whatever stands in it, no slash but an escaped one is left, and no line end."""
    quoted = in_slashes(pattern)
    plain = quoted.replace("\\\\", "").replace("\\/", "")
    assert "/" not in plain
    assert "\n" not in quoted
