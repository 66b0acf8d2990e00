"""An upstream that makes tokens at a fixed pace and nothing else: what the routers of `peers.py` forward.

`python bench/peers_source.py PORT INTERVAL_MS`: any POST is answered by an OpenAI chat stream of `max_tokens` tokens,
the same words as the scripted engine's. One timer serves all streams that are due within a millisecond.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import sys
import zlib
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FRAME = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"scripted","choices":[%b]}\n\n'
DELTA = b'{"index":0,"delta":{"content":" %08x"},"finish_reason":null}'
END = FRAME % b'{"index":0,"delta":{},"finish_reason":"length"}' + b"data: [DONE]\n\n"
BURST = 32


class Clock:
    """When the next token of each stream is due."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._due: list[tuple[float, int, Stream]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, at: float, stream: Stream) -> None:
        heapq.heappush(self._due, (at, next(self._order), stream))
        self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._due[0][0], self._turn) if self._due else None

    def _turn(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + 0.001
        due = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due))
        for at, _, stream in due:
            if stream.step():
                heapq.heappush(self._due, (at + self.interval_s, next(self._order), stream))
        self._arm()


class Stream(asyncio.Protocol):
    """A connection, which may ask again when its answer is complete."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._data = b""
        self._text = ""
        self._index = self._count = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET "):  # a health check
            self._data = b""
            self._write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            return
        try:
            asked = json.loads(_plain(head, body))
        except ValueError:
            return
        self._data = b""
        self._text, self._count, self._index = str(asked["messages"][-1]["content"]), int(asked["max_tokens"]), 0
        self._write(HEAD)
        self._clock.add(asyncio.get_running_loop().time(), self)

    def step(self) -> bool:
        """The next token, or at pace 0 the next few; False after the last."""
        count = min(self._count - self._index, 1 if self._clock.interval_s else BURST)
        frames = b"".join(FRAME % (DELTA % self._token(self._index + i)) for i in range(count))
        self._index += count
        is_last = self._index >= self._count
        frames += END if is_last else b""
        self._write(b"%x\r\n%b\r\n" % (len(frames), frames) + (b"0\r\n\r\n" if is_last else b""))
        return not is_last and self._transport is not None

    def _token(self, index: int) -> int:
        return zlib.crc32(f"{self._text}|0|0|{index}".encode())

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)


def _plain(head: bytes, body: bytes) -> bytes:
    """The body as JSON; a router may send it in chunks."""
    if b"transfer-encoding: chunked" not in head.lower():
        return body
    parts, rest = [], body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    return b"".join(parts)


async def main(port: int, interval_ms: int) -> None:
    clock = Clock(interval_ms / 1000)
    server = await asyncio.get_running_loop().create_server(lambda: Stream(clock), "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
