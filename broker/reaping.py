"""Acting on what has run out, again and again: every pod and every replica does it, and it does not matter which."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import NoReturn

from headrace.broker import metrics
from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Broker, Reaped

_PERIOD_S = 1.0
_REASONS = {
    "leases": "lease",
    "unread": "unread",
    "timeouts": "timeout",
    "no_capacity": "no_capacity",
    "overrun": "max_run",
}


async def reap_for_ever(broker: Broker, shards: Sequence[int], lease_s: float) -> NoReturn:
    """Once a second, and more often where leases are so short that the broker would take that for an outage."""
    while True:
        with contextlib.suppress(BrokerDown):  # others say so; the broker sees the gap and holds back by itself
            for shard in shards:
                _note(await broker.reap(shard))
        await asyncio.sleep(random.uniform(0.75, 1.25) * min(_PERIOD_S, lease_s / 4))


def _note(reaped: Reaped) -> None:
    for field, reason in _REASONS.items():
        if jobs := getattr(reaped, field):
            metrics.REAPED_JOBS.labels(reason).inc(jobs)
