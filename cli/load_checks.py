"""How a stream is checked: against the scripted engine's known words, or else for its order."""

from __future__ import annotations

import zlib
from typing import Protocol


class Check(Protocol):
    """What a stream must say. `tokens` counts what was right so far."""

    tokens: int

    def push(self, position: bytes, text: str) -> bool:
        """Is this the next piece?"""
        ...

    def end(self, max_tokens: int, completion_tokens: int) -> bool:
        """Is this the whole?"""
        ...


class OracleCheck:
    """Every token of the scripted engine, whose text is known: see `workers/engines/scripted.py`."""

    def __init__(self, text: str, seed: int) -> None:
        self._crc = zlib.crc32(f"{text}|{seed}|0|".encode())
        self.tokens = 0

    def push(self, position: bytes, text: str) -> bool:
        for at in range(0, len(text), 9):
            if text[at : at + 9] != f" {zlib.crc32(b'%d' % self.tokens, self._crc):08x}":
                return False
            self.tokens += 1
        return True

    def end(self, max_tokens: int, completion_tokens: int) -> bool:
        return self.tokens == max_tokens == completion_tokens


class OrderCheck:
    """For engines whose words nobody knows before: positions grow, and there is text.

    Positions may skip: a step whose text is held back has one, and no frame.
    """

    def __init__(self, text: str, seed: int) -> None:
        self._last: tuple[int, int, float] = (0, 0, 0.0)
        self.tokens = 0

    def push(self, position: bytes, text: str) -> bool:
        self.tokens += 1
        place, _, index = position.partition(b".")[2].partition(b".")
        attempt, _, n = place.partition(b"-")
        if not attempt.isdigit() or not n.isdigit():
            return False
        last, self._last = self._last, (int(attempt), int(n), float(index or "inf"))
        return last < self._last

    def end(self, max_tokens: int, completion_tokens: int) -> bool:
        self.tokens, seen = completion_tokens, self.tokens
        return seen > 0 and 0 < completion_tokens <= max_tokens
