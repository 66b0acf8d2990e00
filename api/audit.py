"""What is noted of callers: who was refused, and what admins did. Never a key or a part of one, a query, or a body."""

from __future__ import annotations

import contextlib
import logging
import time

from starlette.requests import HTTPConnection

from headrace.broker.api_keys import KeySettings
from headrace.broker.errors import BrokerDown, HeadraceError
from headrace.broker.ledger import AuditEntry, Ledger

log = logging.getLogger(__name__)

_PAUSE_S = 10.0
"""Between two notes of refusals: whoever guesses keys must not fill the log."""


class Audit:
    """See the module. What is noted stands in this process's log and in the broker."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._quiet_until = 0.0
        self._refusals = 0
        """Since the last note."""

    async def refused(self, request: HTTPConnection, error: HeadraceError, key: KeySettings | None) -> None:
        """A key was missing, wrong, or not enough."""
        self._refusals += 1
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + _PAUSE_S
        count, self._refusals = self._refusals, 0
        await self._note(AuditEntry(_actor(request, key), error.code, _where(request), f"{count} since the last note"))

    async def acted(self, request: HTTPConnection, key: KeySettings) -> None:
        """Something was asked for that only admins may do; noted before it is done."""
        await self._note(AuditEntry(_actor(request, key), "admin", _where(request)))

    async def _note(self, entry: AuditEntry) -> None:
        log.warning("%s %s %s %s", entry.action, entry.actor, entry.subject, entry.detail, extra={"event": "audit"})
        with contextlib.suppress(BrokerDown):
            await self._ledger.note(entry)


def _actor(request: HTTPConnection, key: KeySettings | None) -> str:
    address = request.client.host if request.client else "unknown"
    return f"{key.owner} (key {key.id or 'none'}) at {address}" if key else address


def _where(request: HTTPConnection) -> str:
    path = request.scope["path"].encode("ascii", "backslashreplace").decode()
    return f"{request.scope.get('method', 'WS')} {path[:128]}"
