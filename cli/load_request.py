"""One request of a load run: asked, read, checked, and if the plan says so cut and resumed."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from headrace.cli.load_plan import Plan, Totals
from headrace.cli.load_wire import Exchange

_FILLER = "the quick brown fox jumps over the lazy dog "

Target = tuple[str, int]


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Usage(Struct):
    completion_tokens: int = 0


class _Failure(Struct):
    code: str | None = None


class _Frame(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Failure | None = None


_decode = msgspec.json.Decoder(_Frame).decode


class Request:
    """One request, over as many connections as the plan makes of it."""

    def __init__(self, plan: Plan, totals: Totals, targets: Sequence[Target], number: int, due: float) -> None:
        self.heard_at = due
        """When the last event came; `due` is when the request is to begin: TTFT counts from it. By time.monotonic."""
        self._plan = plan
        self._totals = totals
        self._targets = targets
        self._number = number
        self._due = due
        self._text = _prompt(number, plan.prompt_bytes)
        self._check = plan.check(self._text, plan.seed + number)
        self._completion_tokens = 0
        self._is_over = False
        self._is_cut = False
        self._has_finish = False
        self._job = ""
        self._position = b""
        self._cut_at = plan.resume_every
        self._token_at = 0.0
        self._exchange: Exchange | None = None
        self._closed: asyncio.Future[None] | None = None

    async def run(self) -> None:
        self._totals.begun += 1
        for turn in itertools.count(self._number):
            await self._exchange_with(*self._targets[turn % len(self._targets)])
            if self._is_over:
                return

    async def _exchange_with(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._closed = loop.create_future()
        self._exchange = exchange = Exchange(self._bytes(host, port), self)
        try:
            await loop.create_connection(lambda: exchange, host, port)
        except OSError:
            self.fail("cannot_connect")
        else:
            await self._closed

    def _bytes(self, host: str, port: int) -> bytes:
        plan = self._plan
        key = f"authorization: Bearer {plan.api_key}\r\n" if plan.api_key else ""
        shared = f"host: {host}:{port}\r\nconnection: close\r\n{key}"
        if self._job:
            last = f"last-event-id: {self._position.decode()}\r\n" if self._position else ""
            return f"GET /v1/streams/{self._job} HTTP/1.1\r\n{shared}{last}\r\n".encode()
        body = msgspec.json.encode(
            {
                "model": plan.model,
                "messages": [{"role": "user", "content": self._text}],
                "max_tokens": plan.max_tokens,
                "seed": plan.seed + self._number,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{shared}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    # -- what the exchange tells ----------------------------------------------------------------------------------

    def begin(self, job: str) -> None:
        self.heard_at = time.monotonic()
        self._job = job

    def event(self, position: bytes, data: bytes, now: float) -> bool:
        self.heard_at = now
        if data == b"[DONE]":
            self._end()
            return False
        try:
            frame = _decode(data)
        except msgspec.DecodeError:
            self.fail("invalid_frame")
            return False
        self._position = position or self._position
        if frame.error is not None:
            self.fail(frame.error.code or "error")
            return False
        if frame.usage is not None:
            self._completion_tokens = frame.usage.completion_tokens
        if not frame.choices:
            return True
        choice = frame.choices[0]
        self._has_finish = self._has_finish or choice.finish_reason is not None
        return not choice.delta.content or self._take(position, choice.delta.content, now)

    def refuse(self, status: int, body: bytes) -> None:
        try:
            failure = _decode(body).error
        except msgspec.DecodeError:
            failure = None
        self.fail(failure.code if failure and failure.code else f"http_{status}")

    def close(self) -> None:
        if self._is_cut:
            self._is_cut = False
            self._totals.resumes += 1
        elif not self._is_over:
            self.fail("connection_lost")
        assert self._closed is not None
        if not self._closed.done():
            self._closed.set_result(None)

    def fail(self, code: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._totals.errors[code] += 1
            self._totals.tokens += self._check.tokens
            if self._exchange is not None:
                self._exchange.abort()

    def _take(self, position: bytes, text: str, now: float) -> bool:
        """One piece of text; False when the reading of this connection ends with it."""
        totals, check = self._totals, self._check
        if self._token_at:
            totals.itl.append(now - self._token_at)
        else:
            totals.ttft.append(now - self._due)
        self._token_at = now
        if not check.push(position, text):
            totals.mismatches += 1
            self.fail("mismatch")
            return False
        if self._plan.resume_every and check.tokens >= self._cut_at:
            self._cut_at = check.tokens + self._plan.resume_every
            self._is_cut = True
        return not self._is_cut

    def _end(self) -> None:
        """[DONE] is here."""
        self._is_over = True
        is_right = self._has_finish and self._check.end(self._plan.max_tokens, self._completion_tokens)
        self._totals.tokens += self._check.tokens
        self._totals.done += is_right
        self._totals.mismatches += not is_right


def _prompt(number: int, size: int) -> str:
    """A text of about this many bytes, different for each request."""
    head = f"{number} "
    filler = _FILLER * (max(0, size - len(head)) // len(_FILLER) + 1)
    return head + filler[: max(1, size - len(head))]
