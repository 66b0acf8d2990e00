"""Waiting for a broker that is away, and saying so without filling the log."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Broker

log = logging.getLogger(__name__)

_AGAIN_S = 30.0


class Outage:
    """One thing that may stop to work: said at once, then twice a minute, and when it works again."""

    def __init__(self, logger: logging.Logger, event: str, what: str) -> None:
        self._log = logger
        self._event = event
        self._what = what
        self._since: float | None = None
        self._said_at = 0.0

    def down(self, error: Exception) -> None:
        now = time.monotonic()
        if self._since is None or now - self._said_at > _AGAIN_S:
            self._since, self._said_at = self._since or now, now
            lasted_s = now - self._since
            self._log.warning(
                "%s, for %.0f s now; trying again: %s", self._what, lasted_s, error, extra={"event": self._event}
            )

    def up(self) -> None:
        if self._since is not None:
            lasted_s = time.monotonic() - self._since
            self._log.info("%s: over after %.1f s", self._what, lasted_s, extra={"event": f"{self._event}_over"})
            self._since = None


async def open_when_up(broker: Broker) -> None:
    """`Broker.open`, however long the broker is away; raises ConfigError as it does."""
    outage = Outage(log, "broker_down", "the broker does not answer")
    while True:
        try:
            await broker.open()
        except BrokerDown as error:
            outage.down(error)
            await asyncio.sleep(random.uniform(0.3, 0.7))
        else:
            outage.up()
            return
