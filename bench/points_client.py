"""A client that is cheap enough to stand beside what it measures: it keeps what comes and when, and checks it later.

One pass over a response counts its tokens; texts are compared with the oracle when the clock has stopped.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

_CONTENT = re.compile(rb'"content":"((?: [0-9a-f]{8})+)"')
"""One event's text: a step's tokens, of one stream at full speed many."""
_TOKEN_BYTES = 9


@dataclass
class Seen:
    """What one request saw: times are time.perf_counter's seconds."""

    text: str
    asked_at: float
    chunks: list[bytes] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When content came, and how many tokens."""
    ended_at: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    def said(self) -> bytes:
        """The text of the answer, chunk framing taken out."""
        body = b"".join(self.chunks).partition(b"\r\n\r\n")[2]
        return b"".join(_CONTENT.findall(_dechunked(body)))


class Exchange(asyncio.Protocol):
    """One request on a connection of its own; `done` is called when the server has ended or left."""

    def __init__(self, request: bytes, seen: Seen, done: Callable[[], None]) -> None:
        self._request = request
        self._seen = seen
        self._done = done
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._seen.asked_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        seen = self._seen
        seen.chunks.append(data)
        if count := sum(map(len, _CONTENT.findall(data))) // _TOKEN_BYTES:
            seen.arrivals.append((time.perf_counter(), count))
        if data.endswith(b"0\r\n\r\n"):
            seen.ended_at = time.perf_counter()
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()


@dataclass(frozen=True)
class Load:
    """`streams` answers of `tokens` tokens at once, a new one when one ends, over `ports` in turn."""

    streams: int
    tokens: int
    ports: list[int]
    path: str
    model: str
    spread_s: float
    """The first ones begin spread over this time, as those of a service in use would."""


def request(load: Load, text: str, port: int) -> bytes:
    """A chat request that asks for a stream."""
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": load.model, "messages": messages, "max_tokens": load.tokens, "stream": True}).encode()
    head = (
        f"POST {load.path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run(load: Load, until: float) -> list[Seen]:
    """Keep the streams open until perf_counter says `until`, let the last ones end; everything that was asked."""
    all_seen: list[Seen] = []

    async def one(index: int) -> None:
        await asyncio.sleep(load.spread_s * index / load.streams)
        turn = 0
        while time.perf_counter() < until:
            turn += 1
            seen = Seen(f"s{index} {turn} of the bench", time.perf_counter())
            all_seen.append(seen)
            await exchange(load, seen, load.ports[index % len(load.ports)])

    await asyncio.gather(*(one(index) for index in range(load.streams)))
    return all_seen


async def exchange(load: Load, seen: Seen, port: int) -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def done() -> None:
        if not over.done():
            over.set_result(None)

    await loop.create_connection(lambda: Exchange(request(load, seen.text, port), seen, done), "127.0.0.1", port)
    await over


def _dechunked(body: bytes) -> bytes:
    """https://www.rfc-editor.org/rfc/rfc9112#name-chunked-transfer-coding; what is no chunk ends it."""
    parts, at = [], 0
    while (line_end := body.find(b"\r\n", at)) > 0:
        size = int(body[at:line_end], 16)
        if not size:
            break
        parts.append(body[line_end + 2 : line_end + 2 + size])
        at = line_end + 2 + size + 2
    return b"".join(parts)
