"""Server-sent events, read from bytes that may have been cut anywhere.

Follows https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event; `id` is the last one that the stream has named, which may be older than this event."""

    data: str
    id: str = ""
    event: str = "message"


class Parser:
    """Feed it what arrives. A block that is not ended by a blank line when the stream stops was no event."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._is_first_line = True
        self._skips_lf = False
        self._data: list[str] = []
        self._id = ""
        self._event = ""

    def feed(self, data: bytes) -> list[Event]:
        """The events that these bytes complete."""
        events = []
        for line in self._lines(data):
            if line:
                self._field(line.decode(errors="replace"))
            elif event := self._dispatch():
                events.append(event)
        return events

    def _lines(self, data: bytes) -> list[bytes]:
        """Whole lines; a CR ends its line at once, and the LF that may follow it in the next bytes is skipped."""
        if self._skips_lf:
            self._skips_lf = not data
            data = data.removeprefix(b"\n")
        if not data:
            return []
        self._skips_lf = data.endswith(b"\r")
        first, *others = _LINE_END.split(data)
        self._line += first
        lines = []
        for other in others:
            lines.append(bytes(self._line))
            self._line = bytearray(other)
        if lines and self._is_first_line:
            self._is_first_line = False
            lines[0] = lines[0].removeprefix(_BOM)
        return lines

    def _field(self, line: str) -> None:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "data":
                self._data.append(value)
            case "event":
                self._event = value
            case "id" if "\0" not in value:
                self._id = value

    def _dispatch(self) -> Event | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return Event("\n".join(data), self._id, event or "message") if data else None
