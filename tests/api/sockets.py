"""Clients that do what no library would: go without a word, close one half, or take nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.api.deployment import PATHS, Deployment

TAKES_LITTLE = 4096
"""A receive buffer that is full soon."""


class RawClient:
    """One request on one connection, and what has come of the response."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self.read = b""

    @property
    def job(self) -> str:
        head = self.read.partition(b"\r\n\r\n")[0].decode().lower()
        return head.partition("x-request-id: ")[2][:32]

    async def until(self, text: bytes, times: int = 1) -> bytes:
        """Read until `text` has come so often; fails at the end of the connection."""
        while self.read.count(text) < times:
            data = await self._loop.sock_recv(self._socket, 1024)
            assert data, f"the connection ended after {self.read!r}"
            self.read += data
        return self.read

    async def tokens(self, count: int) -> None:
        await self.until(b'"content":" ', count)

    async def rest(self) -> bytes:
        """Read to the end of the connection; a reset is one, too."""
        with contextlib.suppress(ConnectionError):
            while data := await self._loop.sock_recv(self._socket, 65_536):
                self.read += data
        return self.read

    def half_close(self) -> None:
        """FIN, and read on."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """FIN, or RST if something is unread."""
        self._socket.close()

    def reset(self) -> None:
        """RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()


async def send(
    up: Deployment, *, headers: Mapping[str, str] = {}, receive_bytes: int | None = None, pod: int = 0, **fields: Any
) -> RawClient:
    """Send a chat request, whole."""
    body = json.dumps(up.body(**fields)).encode()
    lines = [
        f"POST {PATHS['chat']} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", int(up.pods[pod].url.rpartition(":")[2])))
    await loop.sock_sendall(connection, "\r\n".join([*lines, "", ""]).encode() + body)
    return RawClient(connection)


@contextlib.asynccontextmanager
async def sent(up: Deployment, **request: Any) -> AsyncIterator[RawClient]:
    """A client that is closed at the end, if it is not yet."""
    client = await send(up, **request)
    try:
        yield client
    finally:
        client.close()


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began_at = asyncio.get_running_loop().time()

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self._began_at
