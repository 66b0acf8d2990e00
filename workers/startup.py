"""How long a replica's start takes, by phase: told to the registry while it lasts, and a metric after."""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.broker import metrics

READY = "ready"


class Startup:
    """Pass `show` to the engine as its progress. A phase is what the engine says it is doing, until it says another."""

    def __init__(self, model: str, progress: Callable[[str, float], None]) -> None:
        self.text = ""
        """What is being done now, for people; empty when it is over."""
        self._model = model
        self._progress = progress
        self._phase = "starting"
        self._began_at = self._since = time.monotonic()

    def show(self, what: str, share: float) -> None:
        if what != self._phase:
            self._note(what)
        self.text = f"{what} {share:.0%}"
        self._progress(what, share)

    def end(self) -> float:
        """The replica is ready; returns how long all of it took, in seconds."""
        self._note(READY)
        self.text = ""
        took_s = time.monotonic() - self._began_at
        metrics.STARTUP_SECONDS.labels(self._model, "total").set(took_s)
        return took_s

    def _note(self, next_phase: str) -> None:
        now = time.monotonic()
        if self._phase != READY:
            metrics.STARTUP_SECONDS.labels(self._model, self._phase).set(now - self._since)
        self._phase, self._since = next_phase, now
