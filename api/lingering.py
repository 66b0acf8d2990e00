"""Ending a connection whose client may still be sending.

A socket that is closed while bytes wait unread in it is reset, and a reset can overtake the answer: a proxy then tells
its client 502 in place of 413. So the answer goes out, then the end of our side, and the connection stays for a while,
unread. RFC 9112, 9.6, says so too.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

LINGER_S = 2.0
"""How long an answer may take to reach who is still sending."""
_BODY_WEIGHT = 8
"""A byte of a body pays for so many that are none: chunks of one byte have five around them."""


def linger(transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
    """Write no more, read no more, and close in a while."""
    if transport.is_closing():
        return
    with contextlib.suppress(RuntimeError):  # it reads no more already
        transport.pause_reading()
    if transport.can_write_eof():
        transport.write_eof()
    loop.call_later(LINGER_S, transport.close)


class Unread:
    """In the place of a transport as long as the body of its request is not whole: to close it is to linger."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


class Meter:
    """What a request has cost beside its body: its head, the sizes and extensions of its chunks, its trailers."""

    def __init__(self) -> None:
        self.idle_bytes = 0
        self.body_bytes = 0
        self.is_in_body = False

    def read(self, size: int) -> None:
        """So much has come, of which `body_bytes` was body."""
        self.idle_bytes = max(0, self.idle_bytes + size - _BODY_WEIGHT * self.body_bytes)
        self.body_bytes = 0
