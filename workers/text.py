"""From tokens to text that may be shown: whole characters, no special tokens, nothing of a stop string.

One filter a choice. It is made again by running the logged tokens through it, so its state needs no place in the log.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from headrace.workers.engines.protocol import Token


class TextFilter:
    """Feed tokens, get text. `stop` is the stop string that was found, after which nothing more may be fed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True
        """No half character is held."""
        self._held = ""
        self.stop: str | None = None

    def push(self, tokens: Sequence[Token]) -> str:
        """The text that these tokens make safe to show; bytes that are no UTF-8 become one U+FFFD each."""
        if len(tokens) == 1:  # most steps
            text = "" if tokens[0].is_special else self._text(tokens[0].piece)
        else:
            text = "".join([self._text(token.piece) for token in tokens if not token.is_special])
        return self.push_text(text) if self._stops else text

    def _text(self, piece: bytes) -> str:
        if self._is_whole and piece.isascii():
            return piece.decode("ascii")  # a fourth of the decoder's price, for most tokens
        text = self._decoder.decode(piece)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def push_text(self, text: str) -> str:
        """The same for what is text already."""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            # the earliest match wins; of two at one place the longer, so that the order of the list does not matter
            at, self.stop = min(found, key=lambda match: (match[0], -len(match[1])))
            return self._take(at)
        return self._take(len(self._held) - self._may_begin_stop())

    def flush(self) -> str:
        """What is left at a clean end: text that only looked like a stop string. Half a character is dropped."""
        return "" if self.stop is not None else self._take(len(self._held))

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _may_begin_stop(self) -> int:
        """The length of the longest end of the held text that a stop string begins with."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
