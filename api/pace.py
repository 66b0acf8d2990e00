"""How often streams may be resumed: each folds its log from the start, so it is the dearest thing to repeat."""

from __future__ import annotations

import time

from headrace.broker.api_keys import KeySettings
from headrace.broker.errors import LimitReached
from headrace.broker.limits import Standing

_MOST = 10_000
"""So many owners are remembered."""


class Pace:
    """A bucket for each owner, of this pod: `per_minute` at once, and as many within each minute."""

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, key: KeySettings) -> None:
        """One more; raises LimitReached. Where there are no keys nobody is kept from anything."""
        if not key.sha256:
            return
        now = time.monotonic()
        level, at = self._levels.get(key.owner, (0.0, now))
        level = max(0.0, level - (now - at) * self._per_minute / 60)
        if (over := level + 1 - self._per_minute) > 0:
            retry_ms = round(over * 60_000 / self._per_minute)
            raise LimitReached.of("owner", "resumes_per_minute", self._per_minute, retry_ms, Standing())
        if len(self._levels) >= _MOST:
            self._levels.clear()
        self._levels[key.owner] = level + 1, now
