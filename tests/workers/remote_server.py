"""A server of raw bytes for the remote engine: it says what a test wants, and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any


class Server:
    """Each request gets the next of `answers` (the last one again), whole bytes or chunks with a wait between them."""

    def __init__(self, *answers: bytes | list[bytes | float]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.closed = asyncio.Event()
        """A client has closed its connection while it was answered."""
        self.url = ""

    @contextlib.asynccontextmanager
    async def up(self, port: int = 0) -> AsyncIterator[Server]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            method, path = head.split(" ")[:2]
            if method == "get":
                writer.write(response(b"{}"))
            else:
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                self.requests.append((path, json.loads(await reader.readexactly(length))))
                await self._answer(reader, writer)
            await writer.drain()
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for chunk in [answer] if isinstance(answer, bytes) else answer:
            if isinstance(chunk, bytes):
                writer.write(chunk)
                await writer.drain()
            elif await self._is_gone(reader, chunk):
                return

    async def _is_gone(self, reader: asyncio.StreamReader, wait_s: float) -> bool:
        """Wait, or until the client is gone."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await reader.read()
                self.closed.set()
                return True
        return False


def response(body: bytes, status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    """An answer whose body ends with its connection, so that a cut cannot be told from an end."""
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode() + body


def sse(*events: Any) -> bytes:
    lines = [event if isinstance(event, str) else json.dumps(event, ensure_ascii=False) for event in events]
    return b"".join(f"data: {line}\n\n".encode() for line in lines)


def lines(*objects: Any) -> bytes:
    return b"".join(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in objects)


def delta(content: str | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of OpenAI's chat."""
    return {"choices": [{"index": 0, "delta": {"content": content, **more}, "finish_reason": finish}]}
