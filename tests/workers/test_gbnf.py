"""Grammars with a place that no text can get past."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.engines.gbnf import flaw


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "yes" | "no" # [z-a] (((',
        'root ::= ("a" [^"\\\\\\x7F\\x00-\\x1F] | [a-z-] [-a] [\\]])* "\\"[z-a]"',
        'root ::= [\\u00e9\\U0001F600é] . [^a] "\\n\\t\\\\"',
        "root ::= " + "(" * 256 + '"a"' + ")" * 256,
        "root ::= [^\\x00-\\u0060\\u0062-\\U0010FFFF]",
    ],
)
def test_grammars_that_can_be_gone_on_with_everywhere(grammar: str) -> None:
    assert flaw(grammar) is None


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ("root ::= [z-a]", "[z-a]"),
        ('root ::= "a" [^\\x00-\\U0010FFFF]', "[^"),
        ("root ::= [^\\x01-\\uD7FF\\uDFFF-\\U0010FFFF\\uD800-\\uDFFF]", "[^"),
        ("root ::= []", "[]"),
        ("root ::= [\\x00]", "[\\x00]"),
        ("root ::= [\\uD800-\\uDFFF]", "uD800"),
        ('root ::= "a\\x00"', "x00"),
        ('root ::= "\\U00110000"', "U00110000"),
        ("root ::= <think>", "tokens"),
        ("root ::= <[7]>", "tokens"),
        ("root ::= " + "(" * 257, "parentheses"),
    ],
)
def test_grammars_with_a_dead_end(grammar: str, told: str) -> None:
    assert told in (flaw(grammar) or "")


@given(st.text("abc-", min_size=1, max_size=6).filter(lambda text: not re.search("[abc-]-[abc-]", text)))
def test_a_class_of_plain_characters_has_no_dead_end(inside: str) -> None:
    assert flaw(f"root ::= [{inside}] [^{inside}]") is None
