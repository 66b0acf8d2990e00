"""A tiny HTTP server that says exactly the bytes it is told to, and then cuts the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

JOB = "0000" + "ab" * 14
WORDS = [" one", " two", " ünï", ' "quoted"', " five"]
TEXT = "".join(WORDS)


@dataclass(frozen=True)
class Asked:
    """One request, as the server saw it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = field(repr=False)


Answer = Callable[[Asked], bytes]


class Server:
    """Answers each request with `answer`'s bytes and closes; `asked` is what came."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[Asked] = []
        self.url = ""

    @property
    def calls(self) -> list[str]:
        return [f"{asked.method} {asked.path}" for asked in self.asked]

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        self.asked.append(Asked(method, path, headers, body))
        writer.write(self.answer(self.asked[-1]))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[Server]:
    server = Server(answer)
    listener = await asyncio.start_server(server, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        await listener.wait_closed()


def response(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(status: int, code: str, *headers: str) -> bytes:
    return response(status, json.dumps({"error": {"message": "because", "code": code}}).encode(), *headers)


def stream(frames: Sequence[bytes]) -> bytes:
    """A chunked response, one chunk a frame."""
    head = f"HTTP/1.1 200 OK\r\nx-request-id: {JOB}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(frame), frame) for frame in (*frames, b""))


def frames() -> list[bytes]:
    """What the server says of an answer: an opening, a frame a word, a heartbeat in between, the finish and the end."""
    deltas: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": word} for word in WORDS)]
    said = [
        b'{"choices":[{"index":0,"delta":%b,"finish_reason":null}]}' % json.dumps(delta).encode() for delta in deltas
    ]
    said.append(b'{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}')
    said.append(b'{"choices":[],"usage":{"completion_tokens":%d}}' % len(WORDS))
    framed = [b"id: %b.1-%d\ndata: %b\n\n" % (JOB.encode(), n, data) for n, data in enumerate(said, 1)]
    return [*framed[:3], b": working\n", *framed[3:], b"data: [DONE]\n\n"]


def after(position: str) -> list[bytes]:
    """The frames that follow a position; all of them after none."""
    told = frames()
    if not position:
        return told
    at = next(index for index, frame in enumerate(told) if frame.startswith(f"id: {position}\n".encode()))
    return told[at + 1 :]
