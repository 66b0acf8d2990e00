"""What a response may know of the connection under it: the server puts one into each request's scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.types import Scope

_KEY = "headrace.connection"


class Connection:
    """`abort` ends it at once, whatever is still to be written."""

    def __init__(self, abort: Callable[[], None]) -> None:
        self.abort = abort
        self._is_half_closed = False
        self._call: Callable[[], None] = lambda: None

    def enter(self, scope: Any) -> None:
        scope[_KEY] = self

    @staticmethod
    def of(scope: Scope) -> Connection:
        """The connection of a request; under another server, one that is never half closed and cannot be aborted."""
        found = scope.get(_KEY)
        return found if isinstance(found, Connection) else Connection(lambda: None)

    def when_half_closed(self, call: Callable[[], None]) -> None:
        """Call this once the client has closed its writing side; at once if it has."""
        self._call = call
        if self._is_half_closed:
            call()

    def half_close(self) -> None:
        self._is_half_closed = True
        self._call()
