"""A proxy in front of a Redis server that does what networks do: it cuts, refuses, delays, and swallows messages."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path

_CHUNK = 1 << 16
_ARRAY = re.compile(rb"\*(\d+)\r\n")
_ITEM = re.compile(rb"(?:\$(\d+)|:-?\d+)\r\n")


class Proxy:
    """Listens on the unix socket `path` and forwards to the one at `target`; the fields may be changed at any time."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path = path
        self.url = f"unix://{path}"
        self.is_refusing = False
        """New connections are closed at once."""
        self.is_dropping_hints = False
        """Messages of subscriptions do not arrive; everything else does."""
        self.answer: bytes | None = None
        """What every command of new connections is answered, in place of the server's own answer."""
        self.delay_s = 0.0
        """How long each piece is under way."""
        self.dropped = 0
        self.target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._silent: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.is_refusing = True
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Break every connection there is."""
        for writer in list(self._writers):
            writer.transport.abort()

    def silence(self) -> None:
        """From now on nothing arrives on the connections there are, and nobody is told: their host is gone."""
        self._silent |= self._writers

    async def cut_for(self, seconds: float) -> None:
        """Break every connection, and take none for a while."""
        self.is_refusing = True
        self.cut()
        await asyncio.sleep(seconds)
        self.is_refusing = False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if self.answer is not None:
                await self._answer(reader, writer, self.answer)
            elif not self.is_refusing:
                await self._connect(reader, writer)
        except OSError:
            pass
        finally:
            writer.transport.abort()
            self._writers.discard(writer)
            self._silent.discard(writer)
            self._tasks.discard(task)

    @staticmethod
    async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytes) -> None:
        buffer = b""
        while data := await reader.read(_CHUNK):
            buffer += data
            while (end := _array_end(buffer)) is not None:
                buffer = buffer[end:]
                writer.write(answer + b"\r\n")

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(str(self.target))
        self._writers.add(server_writer)
        messages = _Messages(self._is_dropped)
        up = asyncio.ensure_future(self._pump(reader, server_writer, messages.watch))
        down = asyncio.ensure_future(self._pump(server_reader, writer, messages.filter))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in (up, down):
                pump.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            server_writer.transport.abort()
            self._writers.discard(server_writer)
            self._silent.discard(server_writer)

    def _is_dropped(self) -> bool:
        self.dropped += self.is_dropping_hints
        return self.is_dropping_hints

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if sink not in self._silent:
                    sink.write(change(data))
                    await sink.drain()


class _Messages:
    """One connection's answers; once it has subscribed they are taken apart, and messages can be left out."""

    def __init__(self, is_dropped: Callable[[], bool]) -> None:
        self._is_dropped = is_dropped
        self._is_subscription = False
        self._buffer = b""

    def watch(self, request: bytes) -> bytes:
        self._is_subscription = self._is_subscription or b"SSUBSCRIBE" in request
        return request

    def filter(self, answer: bytes) -> bytes:
        if not self._is_subscription:
            return answer
        self._buffer += answer
        kept = b""
        while (end := _array_end(self._buffer)) is not None:
            message, self._buffer = self._buffer[:end], self._buffer[end:]
            if b"\r\nsmessage\r\n" not in message[:32] or not self._is_dropped():
                kept += message
        if self._buffer and not self._buffer.startswith(b"*"):
            kept, self._buffer = kept + self._buffer, b""
        return kept


def _array_end(data: bytes) -> int | None:
    """Where the RESP2 array at the start of `data` ends; None if it is not whole, or is none."""
    head = _ARRAY.match(data)
    if head is None:
        return None
    at = head.end()
    for _ in range(int(head[1])):
        item = _ITEM.match(data, at)
        if item is None:
            return None
        at = item.end() + (int(item[1]) + 2 if item[1] is not None else 0)
    return at if at <= len(data) else None
