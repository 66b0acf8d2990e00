"""One streamed HTTP response, read as cheaply as Python can: 50,000 chunks a second have to fit on a core.

It reads what a pod writes (HTTP/1.1, chunked or with a length, events that end in two LF) and is no general client;
that one is `headrace.client`.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol, cast

_HEAD_END = b"\r\n\r\n"
_EVENT_END = b"\n\n"


class Sink(Protocol):
    """Who reads the response."""

    def begin(self, job: str) -> None:
        """The headers of a stream are here; `job` is its X-Request-Id."""
        ...

    def event(self, position: bytes, data: bytes, now: float) -> bool:
        """One event that came at `now`; False stops the reading for good.

        Time is time.monotonic's: a loop's own clock may count in whole milliseconds.
        """
        ...

    def refuse(self, status: int, body: bytes) -> None:
        """Another status than 200, with the whole body."""
        ...

    def close(self) -> None:
        """The connection is over; called once, and last."""
        ...


class Exchange(asyncio.Protocol):
    """Sends a request, which must ask for `Connection: close`, and tells the sink what comes."""

    def __init__(self, request: bytes, sink: Sink) -> None:
        self._request = request
        self._sink = sink
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._block = b""
        self._has_head = False
        self._refused_with = 0
        self._body_bytes = 0
        self._is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none by their class
        self._transport = cast(asyncio.Transport, transport)
        if self._is_over:
            self._transport.abort()
        else:
            self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._sink.close()

    def abort(self) -> None:
        """Break the connection; nothing more is told to the sink but that it is over."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        data = self._rest + data if self._rest else data
        if not self._has_head:
            head, end, data = data.partition(_HEAD_END)
            if not end:
                self._rest = head
                return
            self._read_head(head)
        if self._refused_with:
            self._rest = data
            if len(data) >= self._body_bytes:
                self._sink.refuse(self._refused_with, data)
                self.abort()
        else:
            self._rest = self._read_chunks(data)

    def _read_head(self, head: bytes) -> None:
        self._has_head = True
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        code = int(status.split(" ")[1])
        if code == 200:
            self._sink.begin(headers.get("x-request-id", ""))
        else:
            self._refused_with, self._body_bytes = code, int(headers.get("content-length", "0"))

    def _read_chunks(self, data: bytes) -> bytes:
        """Take whole chunks, and return the rest; https://www.rfc-editor.org/rfc/rfc9112#name-chunked-transfer-coding."""
        now, at, end = time.monotonic(), 0, len(data)
        while (line_end := data.find(b"\r\n", at)) > 0:
            start = line_end + 2
            stop = start + int(data[at:line_end], 16)
            if stop + 2 > end:
                break
            if stop == start or not self._read_events(data[start:stop], now):
                self.abort()
                return b""
            at = stop + 2
        return data[at:]

    def _read_events(self, data: bytes, now: float) -> bool:
        *blocks, self._block = (self._block + data if self._block else data).split(_EVENT_END)
        return all(self._read_event(block, now) for block in blocks)

    def _read_event(self, block: bytes, now: float) -> bool:
        if block.startswith(b"id: "):
            first, _, second = block.partition(b"\n")
            if second.startswith(b"data: ") and b"\n" not in second:
                return self._sink.event(first[4:], second[6:], now)
        fields = dict(line.partition(b": ")[::2] for line in block.split(b"\n"))
        return self._sink.event(fields.get(b"id", b""), fields[b"data"], now) if b"data" in fields else True
