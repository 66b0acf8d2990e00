"""Finds what in a GBNF grammar no text can ever match: in such a place llama.cpp ends the whole process.

When a grammar leaves no token to choose, llama.cpp takes the end for chosen and aborts. As every other place of a
grammar can be gone on from by some character, it is enough to look at each character and class by itself.
`llama.cpp/grammars/README.md` is the reference of the syntax.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_DEPTH = 256
"""llama.cpp's parser calls itself for each parenthesis: 100,000 of them end the process too."""

_WORD = re.compile(r'(?s)#[^\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[()<]')
_CHARACTER = re.compile(r"(?s)\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)")
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}

Range = tuple[int, int]

_POSSIBLE: tuple[Range, ...] = ((1, 0xD7FF), (0xE000, 0x10FFFF))
"""What can be in a text of tokens: llama.cpp never chooses a NUL, and surrogates are no UTF-8."""


def flaw(grammar: str) -> str | None:
    """What makes a grammar unfit, in words; None if nothing does. It may still be no GBNF."""
    depth = 0
    for found in _WORD.finditer(grammar):
        word = found[0]
        depth += (word == "(") - (word == ")")
        if depth > MAX_DEPTH:
            return f"it has more than {MAX_DEPTH} parentheses in each other"
        if word == "<":
            return "it names tokens"
        if word[0] == '"' and not all(_is_possible([(code, code)]) for code, _ in _characters(word[1:-1])):
            return f"nothing can match {word}"
        if word[0] == "[" and not _can_match(word[1:-1]):
            return f"nothing can match {word}"
    return None


def _can_match(inside: str) -> bool:
    is_negated = inside.startswith("^")
    ranges = list(_ranges(inside.removeprefix("^")))
    return _is_possible(_without(ranges)) if is_negated else _is_possible(ranges)


def _is_possible(ranges: Iterable[Range]) -> bool:
    return any(max(low, first) <= min(high, last) for low, high in ranges for first, last in _POSSIBLE)


def _without(ranges: Iterable[Range]) -> list[Range]:
    """The gaps between these ranges."""
    gaps, at = [], 0
    for low, high in sorted(each for each in ranges if each[0] <= each[1]):
        gaps.append((at, low - 1))
        at = max(at, high + 1)
    return [(low, high) for low, high in [*gaps, (at, 0x10FFFF)] if low <= high]


def _ranges(inside: str) -> Iterable[Range]:
    characters = list(_characters(inside))
    at = 0
    while at < len(characters):
        low = characters[at][0]
        if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
            yield low, characters[at + 2][0]
            at += 3
        else:
            yield low, low
            at += 1


def _characters(text: str) -> Iterable[tuple[int, bool]]:
    """Each character's code, and whether it was escaped."""
    for found in _CHARACTER.finditer(text):
        two, four, eight, named, plain = found.groups()
        if digits := two or four or eight:
            yield int(digits, 16), True
        else:
            yield ord(plain or _NAMED.get(named, named)), plain is None
