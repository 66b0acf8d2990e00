"""Bytes of a stream into events, wherever the network has cut them: server-sent events, and JSON lines.

What is not closed (a block without its blank line, a line without its end) is no event: whoever reads finds that the
stream has ended early.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from headrace.broker.errors import EngineFailed

MAX_EVENT_BYTES = 64 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
_LINE_END = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    """`name` is empty where the stream gave none."""

    data: bytes
    name: str = ""


class Frames(Protocol):
    """Feed bytes, get the events that they complete; raises EngineFailed if one grows beyond all bounds."""

    def feed(self, chunk: bytes) -> list[Event]: ...


class SseFrames:
    """Server-sent events by the WHATWG's rules: lines end with CR, LF or both; comments are nothing."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_after_cr = False
        self._is_first = True
        self._data: list[bytes] = []
        self._name = ""

    def feed(self, chunk: bytes) -> list[Event]:
        events = []
        for line in self._lines(chunk):
            if line:
                self._take(line)
                continue
            if self._data:
                events.append(Event(b"\n".join(self._data), self._name))
            self._data, self._name = [], ""
        return events

    def _lines(self, chunk: bytes) -> list[bytes]:
        if not chunk:
            return []
        if self._is_after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
            self._is_after_cr = False
        if chunk:
            self._is_after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        _check_size(len(self._rest) + sum(map(len, self._data)))
        if lines and self._is_first:
            self._is_first = False
            lines[0] = lines[0].removeprefix(BOM)
        return lines

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value.decode("utf-8", "replace")


class LineFrames:
    """One JSON object a line. Only LF ends a line: U+2028 and the like are text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        _check_size(len(self._rest))
        return [Event(line) for line in lines if line.strip()]


def _check_size(held: int) -> None:
    if held > MAX_EVENT_BYTES:
        raise EngineFailed("the remote server sends an event without an end")
