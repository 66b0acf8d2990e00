"""The keys a pod knows: those of the configuration, and those of the broker as far as they were asked for.

Once a second the pod asks whether any key of the broker was changed; then it forgets what it knew of them. So a key
that is revoked is refused everywhere within two seconds, and one that is used costs no round trip.
"""

from __future__ import annotations

import hmac
import time

from headrace.api.access import is_loopback
from headrace.broker.api_keys import KeySettings, digest
from headrace.broker.errors import BrokerDown, Unauthorized
from headrace.broker.ledger import Ledger
from headrace.broker.settings import Settings

_MOST = 10_000
"""So many are remembered, of those that do not exist too."""


class Keyring:
    """See the module."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self._configured = {key.sha256: key for key in settings.keys}
        self._ledger = ledger
        self._anonymous = _anonymous(settings)
        self._version: int | None = None
        """Of the broker's keys; None as long as it was not heard of."""
        self._known: dict[str, KeySettings | None] = {}

    async def refresh(self) -> None:
        """Ask whether keys have changed; raises BrokerDown."""
        version = await self._ledger.version()
        if version != self._version:
            self._version = version
            self._known.clear()

    async def find(self, token: str) -> KeySettings:
        """The key, or the anonymous one where there are none; raises Unauthorized, which shows nothing of what came."""
        if not self._configured and (anonymous := self._open()):
            return anonymous
        key = await self._look_up(digest(token)) if token else None
        if key is None or key.has_expired(time.time()):
            raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer <key>, or x-api-key: <key>")
        return key

    def _open(self) -> KeySettings | None:
        if self._version is None and self._anonymous:
            raise BrokerDown("the broker has not yet said whether there are keys", retry_after_s=1)
        return self._anonymous if self._version == 0 else None

    async def _look_up(self, sha256: str) -> KeySettings | None:
        """Found by its hash. Whoever sends a key cannot choose what that begins with, and it is compared as a whole."""
        key = self._configured.get(sha256)
        if key is None and self._version != 0:
            key = self._known[sha256] if sha256 in self._known else await self._ask(sha256)
        return key if key is not None and hmac.compare_digest(key.sha256, sha256) else None

    async def _ask(self, sha256: str) -> KeySettings | None:
        version = self._version
        stored = await self._ledger.key(sha256)
        key = stored.key if stored is not None and stored.revoked_ms is None else None
        if version == self._version:  # else it may have been read before the change that was noticed meanwhile
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[sha256] = key
        return key


def _anonymous(settings: Settings) -> KeySettings | None:
    """Who everybody is where there are no keys: on this machine one who may do all, else nobody, or a mere user."""
    if is_loopback(settings.api.host):
        return KeySettings("anonymous", "", scopes=("use", "metrics", "admin"))
    return KeySettings("anonymous", "", scopes=("use", "metrics")) if settings.api.insecure else None
