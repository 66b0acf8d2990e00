"""When a log's writer writes its next batch.

To wake three processes costs more than most batches do, so batches follow each other no faster than a pace in the long
run; one may be early, so that a step that is alone is not held back. What is urgent (a first token, an end) does not
wait, nor makes what comes after it wait. What was acknowledged goes with the next entries where these follow closely.
"""

from __future__ import annotations

import asyncio
import math
import time

NOW = -math.inf
_PATIENCE = 1.5
"""Paces that hints wait for the entries to come, if the last ones came within as many."""


class Rhythm:
    """See the module. Times are time.monotonic's seconds; `wake` is set when a batch is due."""

    def __init__(self, pace_s: float) -> None:
        self.wake = asyncio.Event()
        self.entries_at = 0.0
        """When a batch may be written that brings entries."""
        self._pace_s = pace_s
        self._due = 0.0
        """When the next batch is due, were they written evenly."""
        self._entered = -math.inf
        """When the last batch with entries was written."""
        self._patient_until = 0.0
        """Until when hints wait for entries; 0 if they do not."""
        self._at = math.inf
        """When the next batch will be written; infinite if nothing waits."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def hints_at(self) -> float:
        """When a batch may be written that brings nothing but hints."""
        return self._patient_until or self.entries_at

    def late_at(self, now: float) -> float:
        """When a batch may be written that brings what better goes with the entries to come."""
        return max(self.entries_at, now + self._pace_s)

    def ask(self, at: float) -> None:
        """Have a batch written then, or earlier: what comes until then goes with it."""
        if at >= self._at:
            return
        self._stop()
        self._at = at
        wait_s = at - time.monotonic()
        if wait_s <= 0:
            self.wake.set()
        else:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.wake.set)

    def begin(self, now: float, *, has_entries: bool) -> None:
        """A batch is written now, with all that waits."""
        self.wake.clear()
        self._stop()
        self._at, pace_s = math.inf, self._pace_s
        self._due = min(max(self._due, now), now + pace_s) + pace_s  # urgent ones in a row delay nobody
        self.entries_at = self._due - pace_s
        if has_entries:
            is_close = now - self._entered < _PATIENCE * pace_s
            self._entered, self._patient_until = now, now + _PATIENCE * pace_s if is_close else 0.0

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
