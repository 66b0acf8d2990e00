"""Event loops, and ending background tasks for certain."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Iterable

_AGAIN_S = 0.1
_YOUNG = 20_000
"""Objects made, less those gone, until the collector looks at the youngest."""


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's loops if it is installed (it is not on Windows), else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def collect_less() -> None:
    """Have Python's collector of cycles look rarely, and never at what is there now; called once a process is loaded.

    A token makes a few objects and no cycle. By default each thousandth token would have the collector go over all
    that is alive, the modules' hundred thousands among it: much of a process's time with a thousand streams.

    Not beside torch: a few objects in a cycle may hold gigabytes of tensors, and the collector counts objects.
    """
    if "torch" in sys.modules:
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 10, 20)


async def cancel_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until they have ended.

    One cancel is not enough: before Python 3.12, `asyncio.wait_for` inside a client library can swallow it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
