"""An upstream that makes tokens at a fixed pace and nothing else: what the routers of `peers.py` forward.

`python bench/peers_source.py PORT INTERVAL_MS`: any POST is answered by an OpenAI chat stream of `max_tokens` tokens,
the same words as the scripted engine's. Streams that are due within 5 ms are served together, as that engine's are.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import sys
import zlib
from typing import cast

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FRAME = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"scripted","choices":[%b]}\n\n'
DELTA = b'{"index":0,"delta":{"content":" %08x"},"finish_reason":null}'
END = FRAME % b'{"index":0,"delta":{},"finish_reason":"length"}' + b"data: [DONE]\n\n"
BURST = 32
STEP_S = 0.005


class Clock:
    """When the next token of each stream is due."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._turns: list[float] = []
        self._waiting: dict[float, list[tuple[float, Stream]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, due: float, stream: Stream) -> None:
        self._put(due, due, stream)
        self._arm()

    def _put(self, at: float, due: float, stream: Stream) -> None:
        if at not in self._waiting:
            self._waiting[at] = []
            heapq.heappush(self._turns, at)
        self._waiting[at].append((due, stream))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._turns[0], self._turn) if self._turns else None

    def _turn(self) -> None:
        self._timer = None
        now = asyncio.get_running_loop().time() + 0.001
        ready = []
        while self._turns and self._turns[0] <= now:
            ready += self._waiting.pop(heapq.heappop(self._turns))
        for due, stream in ready:
            if stream.step():
                after = due + self.interval_s
                self._put(after // STEP_S * STEP_S, after, stream)
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
