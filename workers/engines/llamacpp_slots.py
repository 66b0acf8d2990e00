"""Runs sequences on llama.cpp: a thread for each of its slots, and the threads' queue for what has to wait.

llama.cpp has a queue too, but what waits there cannot be cancelled, so no more than its slots are ever given to it. The
threads only pass on bytes; all else happens on the event loop's thread, which is woken once for whatever has come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol

from headrace.broker.errors import BadRequest, EngineFailed, HeadraceError
from headrace.workers.engines.protocol import Step

logger = logging.getLogger(__name__)

Complete = Callable[[bytes, Callable[[bytes], bool]], None]
"""Makes a sequence: blocks, calls back with every chunk, and stops when the callback returns true."""


class Reader(Protocol):
    """Makes steps of the chunks of one sequence."""

    def read(self, raw: bytes) -> Step | None: ...


class Sequence:
    """A sequence that was started; a protocol `Run`."""

    def __init__(
        self, body: bytes, reader: Reader, emit: Callable[[Step], None], fail: Callable[[Exception], None]
    ) -> None:
        self.body = body
        self.complete: Complete | None = None
        """What makes it, if not that of the slots."""
        self.is_over = False
        self._reader = reader
        self._emit = emit
        self._fail = fail

    def cancel(self) -> None:
        self.is_over = True

    def take(self, raw: bytes) -> None:
        """Read one chunk and emit its step; never raises, because the other sequences go on."""
        if self.is_over:
            return
        try:
            step = self._reader.read(raw)
            if step is not None:
                self.give(step)
        except HeadraceError as error:
            self.fail(error)
        except Exception:
            logger.exception("a sequence failed", extra={"event": "sequence_failed", "request_id": "-"})
            self.fail(EngineFailed())

    def give(self, step: Step) -> None:
        if not self.is_over:
            self.is_over = step.end is not None
            self._emit(step)

    def fail(self, error: Exception) -> None:
        if not self.is_over:
            self.is_over = True
            self._fail(error)


class Slots:
    """At most `count` sequences at a time, in the order of `start`. All but `join` is called on the loop's thread."""

    def __init__(self, complete: Complete, count: int, loop: asyncio.AbstractEventLoop) -> None:
        self._complete = complete
        self._loop = loop
        self._count = count
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="llamacpp")
        self._open: set[Sequence] = set()
        self._arrived: deque[tuple[Sequence, bytes | Future[None]]] = deque()
        self._is_woken = False
        self._busy_s = 0.0
        self._busy_since = 0.0

    @property
    def running(self) -> int:
        """Sequences that are in llama.cpp."""
        return min(len(self._open), self._count)

    @property
    def busy_s(self) -> float:
        """For how long there was at least one."""
        return self._busy_s + (time.perf_counter() - self._busy_since if self._open else 0.0)

    def start(self, sequence: Sequence) -> None:
        if not self._open:
            self._busy_since = time.perf_counter()
        self._open.add(sequence)
        self._threads.submit(self._make, sequence).add_done_callback(partial(self._put, sequence))

    def cancel_all(self) -> None:
        for sequence in self._open:
            sequence.cancel()

    def join(self) -> None:
        """Block until no thread is inside llama.cpp: to destroy it earlier is a segmentation fault."""
        self._threads.shutdown(wait=True)

    def _make(self, sequence: Sequence) -> None:
        """On a thread of the pool, for as long as the sequence runs."""
        if not sequence.is_over:
            complete = sequence.complete or self._complete
            complete(sequence.body, partial(self._receive, sequence))

    def _receive(self, sequence: Sequence, raw: bytes) -> bool:
        """On a sequence's thread. A loop that is gone ends it, so that a process which forgot to close can exit."""
        if sequence.is_over or self._loop.is_closed():
            return True
        self._put(sequence, raw)
        return False

    def _put(self, sequence: Sequence, item: bytes | Future[None]) -> None:
        self._arrived.append((sequence, item))
        if not self._is_woken and not self._loop.is_closed():
            self._is_woken = True
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # Reset before the first look: what arrives after the last look then wakes the loop again.
        self._is_woken = False
        while self._arrived:
            sequence, item = self._arrived.popleft()
            if isinstance(item, bytes):
                sequence.take(item)
            else:
                busy_s = self.busy_s
                self._open.discard(sequence)
                if not self._open:
                    self._busy_s = busy_s
                sequence.fail(_failure(item.exception()))


def _failure(error: BaseException | None) -> HeadraceError:
    """llama.cpp raises ValueError for a request that it does not take."""
    if isinstance(error, ValueError):
        return BadRequest(str(error))
    return EngineFailed(f"llama.cpp stopped without an end: {error or 'no reason given'}")
