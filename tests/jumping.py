"""An event loop whose clock jumps to the next timer, for tests of what happens over time without any I/O."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jump(selectors.SelectSelector):
    """Instead of waiting, it says how long the wait would have been."""

    waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everything waits for something that never comes")
        self.waited_s += max(0.0, timeout)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return super().time() + self._jump.waited_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in no time. Whatever waits for a thread or a socket fails."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(main)
