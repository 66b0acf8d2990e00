"""Reading a stream strictly: what the project writes is narrower than what the format allows, and stays so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_BLOCK = re.compile(rb"(?:: [^\r\n]*\n)*(?:id: ([0-9a-f]{32}\.[0-9]+-[0-9]+(?:\.[0-9]+)?)\n)?data: ([^\r\n]+)\n")
DONE = "[DONE]"


class Event(NamedTuple):
    """One event; `id` is empty where there is no such line."""

    id: str
    data: str

    @property
    def json(self) -> Any:
        return json.loads(self.data)


def parse(body: bytes) -> list[Event]:
    """The events of a whole stream; fails if a byte of it is not as it must be."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b"", f"an unterminated block: {rest!r}"
    events = []
    for block in blocks:
        found = _BLOCK.fullmatch(block + b"\n")
        assert found is not None, f"not an event: {block!r}"
        events.append(Event((found[1] or b"").decode(), found[2].decode()))
    return events


def frames(events: Sequence[Event]) -> list[Any]:
    """What the events say, without the end marker, which must be there, once and last."""
    assert [event.data for event in events].index(DONE) == len(events) - 1
    return [event.json for event in events[:-1]]


def choices(events: Sequence[Event], index: int = 0) -> list[dict[str, Any]]:
    return [choice for frame in frames(events) for choice in frame.get("choices", ()) if choice["index"] == index]


def text_of(choice: dict[str, Any]) -> str:
    """The text of one choice, of either route, in a stream or whole."""
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


def content(events: Sequence[Event], index: int = 0) -> str:
    return "".join(map(text_of, choices(events, index)))


def finishes(events: Sequence[Event], index: int = 0) -> list[str | None]:
    return [choice["finish_reason"] for choice in choices(events, index)]


def errors(events: Sequence[Event]) -> list[dict[str, Any]]:
    return [frame["error"] for frame in frames(events) if "error" in frame]
