"""Starting while the broker is down: wait for it, and do not fill the log meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time

from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Broker

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_SAY_EVERY_S = 10.0


class Throttle:
    """Something that may be said again only after a while."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._due_at = 0.0

    def is_due(self) -> bool:
        """True at most once in this time: say it now."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + self._every_s
        return True


async def open_when_up(broker: Broker, say_every_s: float = _SAY_EVERY_S) -> None:
    """Open the broker, waiting for as long as it is down; raises ConfigError as `open` does."""
    throttle, started_at = Throttle(say_every_s), time.monotonic()
    while True:
        try:
            await broker.open()
        except BrokerDown as error:
            if throttle.is_due():
                waited_s = time.monotonic() - started_at
                log.warning("waiting for the broker (%.0f s): %s", waited_s, error, extra={"event": "broker_down"})
            await asyncio.sleep(_AGAIN_S)
        else:
            if time.monotonic() - started_at > _AGAIN_S:
                log.info("the broker is there", extra={"event": "broker_up"})
            return
