"""What a response may know of the connection under it: the server puts one into each request's scope."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.types import Scope

_KEY = "headrace.connection"


class Connection:
    """One request's connection; under another server than ours, one that can nothing and tells nothing."""

    def __init__(self) -> None:
        self.received_at = time.monotonic()
        """When the request's first byte was there; of a WebSocket, its first message."""
        self._is_half_closed = False
        self._call_half_closed: Callable[[], None] = lambda: None
        self._call_lost: Callable[[], None] = lambda: None

    def enter(self, scope: Any) -> None:
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> Connection:
        found = scope.get(_KEY)
        return found if isinstance(found, Connection) else Connection()

    def abort(self) -> None:
        """End it at once, whatever is still to be written."""

    def can_write_chunk(self) -> bool:
        """May `write_chunk` be used now? Not if the client must first take what was written before."""
        return False

    def write_chunk(self, data: bytes) -> None:
        """Write more of the body of a response that has begun, past `send` and every layer that wraps it."""
        raise NotImplementedError

    def can_tell_lost(self) -> bool:
        """Does `when_lost` serve? Not while a body is still to be read: then only `receive` tells."""
        return False

    def when_half_closed(self, call: Callable[[], None]) -> None:
        """Call this once the client has closed its writing side; at once if it has."""
        self._call_half_closed = call
        if self._is_half_closed:
            call()

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this when the connection is gone."""
        self._call_lost = call

    def forget(self) -> None:
        """Call nobody any more: who was to be called would stay with the connection, and both until a collection."""
        self._call_half_closed = self._call_lost = lambda: None

    def half_close(self) -> None:
        self._is_half_closed = True
        self._call_half_closed()

    def lose(self) -> None:
        self._call_lost()
