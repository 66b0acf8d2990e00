"""Short logs for the tests of formats, and what a format makes of them."""

from __future__ import annotations

import json
from typing import Any

from headrace.api.wire import BY_NAME
from headrace.broker.messages import AnyEvent, Claimed, Queued, ReadEntry, View

Log = tuple[AnyEvent | list[AnyEvent], ...]
"""What follows `Queued` and `Claimed`; a list is an entry of several events."""


def a_view(name: str, **fields: Any) -> View:
    return View("owner", "m", name, stream=True, **fields)


def entries(log: Log) -> list[ReadEntry]:
    start: Log = (Queued(1_700_000_000_999), Claimed("w", "0-1"))
    packed = [each if isinstance(each, list) else [each] for each in (*start, *log)]
    return [ReadEntry(f"1-{n}", n, each) for n, each in enumerate(packed)]


def streamed(name: str, log: Log, **view: Any) -> list[dict[str, Any]]:
    """The frames, read."""
    fold = BY_NAME[name].fold("ab", a_view(name, **view))
    return [json.loads(frame) for entry in entries(log) for frame in fold.feed(entry)]


def whole(name: str, log: Log, **view: Any) -> dict[str, Any]:
    """The response in one piece, read."""
    fold = BY_NAME[name].whole("ab", a_view(name, **view))
    for entry in entries(log):
        fold.feed(entry)
    body: dict[str, Any] = json.loads(fold.body())
    return body
