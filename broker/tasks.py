"""Event loops, and ending background tasks for certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

_AGAIN_S = 0.1


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops if it is installed (it is not on Windows), else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended.

    One cancel is not enough: before Python 3.12, `asyncio.wait_for` inside a client library can swallow it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
