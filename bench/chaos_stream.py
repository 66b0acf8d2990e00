"""One client of the chaos run: it reads a stream to its end, wherever it has to go for it, and says what was wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from headrace.client import sse
from headrace.workers.engines.scripted import oracle

_HOST = "127.0.0.1"
_SILENCE_S = 10.0
_ANSWER_S = 10.0
_PASSING = frozenset({"broker_down", "broker_full", "unavailable", "queue_full", "no_capacity"})
DEADLINE_S = 90.0
"""From accepted to the end of the stream, whatever happens meanwhile."""
CANCEL_S = 15.0
"""From a cancel that was answered to the end of the stream."""


class Broken(Exception):
    """The connection is over, or the pod cannot answer now."""


class Refused(Exception):
    """An answer other than 200 that no other pod would give otherwise."""

    def __init__(self, status: int, code: str) -> None:
        self.status = status
        self.code = code
        super().__init__(f"HTTP {status} {code}")


@dataclass
class Answer:
    """An open response: its status and headers, and the body in the pieces that the pod wrote."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def pieces(self) -> AsyncIterator[bytes]:
        try:
            if "content-length" in self.headers:
                yield await asyncio.wait_for(self.reader.readexactly(int(self.headers["content-length"])), _SILENCE_S)
                return
            while size := int(await asyncio.wait_for(self.reader.readline(), _SILENCE_S) or b"x", 16):
                yield (await asyncio.wait_for(self.reader.readexactly(size + 2), _SILENCE_S))[:-2]
        except (TimeoutError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise Broken(repr(error)) from error

    async def json(self) -> Any:
        return json.loads(b"".join([piece async for piece in self.pieces()]))


@contextlib.asynccontextmanager
async def ask(port: int, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> AsyncIterator[Answer]:
    """One request on a connection of its own; raises Broken or Refused unless it is answered with 200."""
    try:
        reader, writer = await asyncio.open_connection(_HOST, port)
    except OSError as error:
        raise Broken(repr(error)) from error
    try:
        named = {"host": _HOST, "connection": "close", "content-length": str(len(body)), **headers}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in named.items())
        writer.write(head.encode() + b"\r\n" + body)
        answer = await _head(reader, writer)
        if answer.status != 200:
            code = (await answer.json()).get("error", {}).get("code", "")
            if code in _PASSING or (answer.status >= 500 and code in ("", "internal_error")):
                raise Broken(f"HTTP {answer.status} {code}")
            raise Refused(answer.status, code)
        yield answer
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
    try:
        raw = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _ANSWER_S)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise Broken(repr(error)) from error
    status, *lines = raw.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return Answer(int(status.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}, reader, writer)


@dataclass
class Reading:
    """What was read of a stream so far, over all its connections."""

    text: str = ""
    position: str = ""
    finish: str | None = None
    error: str | None = None
    is_done: bool = False
    violations: list[str] = field(default_factory=list)

    def take(self, event: sse.Event) -> None:
        if self.is_done:
            self.violations.append(f"after the end: {event.data[:60]}")
        elif event.data == "[DONE]":
            self.is_done = True
            if (self.finish is None) == (self.error is None):
                self.violations.append(f"ended with finish {self.finish} and error {self.error}")
        else:
            self._take_frame(event, json.loads(event.data))

    def _take_frame(self, event: sse.Event, frame: dict[str, Any]) -> None:
        if self.finish or self.error:
            self.violations.append(f"after finish or error: {event.data[:60]}")
        if "error" in frame:
            self.error = str(frame["error"].get("code"))
            return
        self.position = event.id or self.position
        if frame["choices"]:
            self.text += frame["choices"][0]["delta"].get("content") or ""
            self.finish = frame["choices"][0].get("finish_reason")


class Stream:
    """One stream and its client. `outcome` is `done`, `cancelled`, `lost` or empty while it runs."""

    def __init__(self, number: int, seed: int, tokens: int, ports: list[int]) -> None:
        self.number = number
        self._choice = random.Random(f"{seed}-{number}")
        self._ports = ports
        self.tokens = self._choice.randint(max(1, tokens // 2), tokens)
        self._prompt = f"chaos {number}"
        self._seed = self._choice.randrange(1 << 31)
        self.expected = "".join(f" {oracle(self._prompt, self._seed, 0, index):08x}" for index in range(self.tokens))
        self.reading = Reading()
        self.job = ""
        self.outcome = ""
        self.reconnects = 0
        self.longest_gap_s = 0.0
        self.violations: list[str] = []
        self._cancelled_at: float | None = None
        self._moved_at = 0.0
        self._measured = 0
        self._open: Answer | None = None

    @property
    def is_running(self) -> bool:
        return bool(self.job) and not self.outcome

    def cut(self) -> None:
        """Break the client's connection; it goes on at another pod."""
        if self._open is not None:
            self._open.writer.transport.abort()

    async def cancel(self) -> None:
        """DELETE at any pod, until one has answered."""
        while self.is_running:
            try:
                async with ask(self._port(), "DELETE", f"/v1/streams/{self.job}", {}) as answer:
                    await answer.json()
                self._cancelled_at = self._cancelled_at or time.monotonic()
                return
            except Broken:
                await asyncio.sleep(0.2)
            except Refused:
                return

    async def run(self) -> None:
        """To the end, whatever it is; what is wrong is in `violations`."""
        try:
            await self._accepted()
            async with asyncio.timeout(DEADLINE_S):
                while not self.reading.is_done:
                    await self._resume()
            self._judge()
        except TimeoutError:
            self.violations.append(f"no end within {DEADLINE_S:g} s, at {self.reading.position}")
        except Refused as error:
            if error.code not in ("log_lost", "stream_not_found"):
                self.violations.append(f"refused: {error}")
            self.reading.error = error.code
            self._judge()
        self.violations += self.reading.violations
        self.outcome = self.outcome or "failed"

    async def audit(self, *, may_lose: bool) -> None:
        """Read the whole log again, through any pod: the same text, one end, and a status that agrees.

        If the server may lose what was read already (`may_lose`), the job may run again from there; it must end again.
        """
        if self.outcome not in ("done", "cancelled"):
            return
        again = Reading()
        async with asyncio.timeout(DEADLINE_S):
            while not again.is_done:
                again = Reading()
                with contextlib.suppress(Broken):
                    try:
                        await self._read_once(again, "")
                    except Refused as error:  # it ended before its engine had begun, and says so with a status
                        again.error, again.is_done = error.code, True
            state = await self._state(until_ended=may_lose)
        self.violations += [f"audit: {each}" for each in again.violations]
        if not self.expected.startswith(again.text):
            self.violations.append("audit: the log says another text than the engine")
        if may_lose:
            return
        if not again.text.startswith(self.reading.text):
            self.violations.append("audit: the log says less than the client has")
        if self.outcome == "done" and (again.text, state) != (self.expected, "done"):
            self.violations.append(f"audit: a done stream is {state}, with {len(again.text)} characters")
        if self.outcome == "cancelled" and state != "cancelled":
            self.violations.append(f"audit: a cancelled stream is {state}")

    async def _state(self, *, until_ended: bool) -> str:
        while True:
            with contextlib.suppress(Broken):
                async with ask(self._port(), "GET", f"/v1/streams/{self.job}/status", {}) as answer:
                    state = str((await answer.json())["state"])
                    if not until_ended or state not in ("waiting", "running"):
                        return state
            await asyncio.sleep(0.2)

    async def _accepted(self) -> None:
        """POST until a pod has answered with a stream; a request whose answer was lost is ended by its grace time."""
        body = {
            "model": "scripted", "messages": [{"role": "user", "content": self._prompt}], "seed": self._seed,
            "max_tokens": self.tokens, "stream": True,
        }  # fmt: skip
        while not self.job:
            with contextlib.suppress(Broken):
                async with ask(self._port(), "POST", "/v1/chat/completions", {}, json.dumps(body).encode()) as answer:
                    self.job = answer.headers["x-request-id"]
                    self._moved_at = time.monotonic()
                    await self._read(answer, self.reading)
            if not self.job:
                await asyncio.sleep(self._choice.uniform(0.1, 0.4))

    async def _resume(self) -> None:
        self.reconnects += 1
        await asyncio.sleep(self._choice.uniform(0.0, 0.3))
        with contextlib.suppress(Broken):
            await self._read_once(self.reading, self.reading.position)

    async def _read_once(self, reading: Reading, position: str) -> None:
        headers = {"last-event-id": position} if position else {}
        async with ask(self._port(), "GET", f"/v1/streams/{self.job}", headers) as answer:
            await self._read(answer, reading)

    async def _read(self, answer: Answer, reading: Reading) -> None:
        parser = sse.Parser()
        self._open = answer
        try:
            async for piece in answer.pieces():
                for event in parser.feed(piece):
                    reading.take(event)
                self._measure(reading)
        finally:
            self._open = None

    def _measure(self, reading: Reading) -> None:
        """Note how long nothing new has come; heartbeats are nothing new."""
        now = time.monotonic()
        if reading is self.reading and len(reading.text) > self._measured:
            self.longest_gap_s = max(self.longest_gap_s, now - self._moved_at)
            self._moved_at, self._measured = now, len(reading.text)

    def _judge(self) -> None:
        reading, expected = self.reading, self.expected
        if not expected.startswith(reading.text):
            at = next(i for i, (a, b) in enumerate(zip(reading.text, expected + "\0", strict=False)) if a != b)
            self.violations.append(f"wrong text from token {at // 9}: {reading.text[at - at % 9 :][:27]!r}")
        if reading.error in ("log_lost", "log_gap", "stream_not_found"):
            self.outcome = "lost"
        elif reading.error == "cancelled" and self._cancelled_at is not None:
            self.outcome = "cancelled"
            took_s = time.monotonic() - self._cancelled_at
            if took_s > CANCEL_S:
                self.violations.append(f"cancelled, and ended only {took_s:.1f} s later")
        elif reading.error is not None:
            self.violations.append(f"failed: {reading.error}")
        else:
            self.outcome = "done"
            if reading.text != expected:
                self.violations.append(f"ended after {len(reading.text) // 9} of {self.tokens} tokens")

    def _port(self) -> int:
        return self._choice.choice(self._ports)
