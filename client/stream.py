"""Chat over HTTP that outlives its connections.

A stream is a job in the server's log. Each event names its position; when a connection is lost, the next pod is asked
for what follows the last position that was seen, so the text has no hole and nothing twice. The request itself carries
an Idempotency-Key, so that it can be sent again, to any pod, and makes one job all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx

from headrace.client import sse
from headrace.client.errors import ClientError, ConnectionLost, RequestRefused, StreamFailed, error_in, read_error

_CONNECT_S = 5.0
_CANCEL_S = 5.0
_BACKOFF_MAX_S = 5.0
_DOUBLINGS_MAX = 16
_ON_DISCONNECT_MAX_S = 86_400.0

_PASSING = frozenset({"broker_down", "broker_full", "internal_error", "unavailable"})
"""What a pod says of itself and not of a job: another pod, or a later time, may say otherwise."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer; what it does not say is empty or None."""

    text: str
    reasoning: str | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    position: str = ""
    """Where a reader that has this much goes on: `<job>.<place in its log>`."""
    choice: int = 0
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """Pieces of calls, as OpenAI's deltas have them: `index` says of which."""


class Client:
    """Speaks to the pods of one deployment, any of which can answer anything; `urls` are their addresses, in order.

    `give_up_s` bounds the time without a byte from any pod after a connection was lost; the server is asked to go on
    with the job for as long. `silence_s` is how long a connection may say nothing (heartbeats are not nothing) before
    it counts as lost. `on_reconnect` is called with the address when a stream goes on there.
    """

    def __init__(
        self,
        urls: Sequence[str],
        api_key: str | None = None,
        *,
        give_up_s: float = 60.0,
        silence_s: float = 60.0,
        backoff_s: float = 0.1,
        on_reconnect: Callable[[str], None] = lambda _: None,
    ) -> None:
        if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
            raise ValueError("a client needs addresses that begin with http:// or https://")
        self.urls = [url.rstrip("/") for url in urls]
        self.give_up_s = give_up_s
        self.backoff_s = backoff_s
        self.on_reconnect = on_reconnect
        # no connection is used twice: one that the server has closed meanwhile would look like a lost request
        self.http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(silence_s, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self.http.aclose()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **params: Any) -> AsyncGenerator[Chunk, None]:
        """Generate an answer; `params` are the fields of OpenAI's chat route, `model` among them.

        Every loss of a connection is healed, that of the request too: sent again it joins the job that it made, if it
        made one. Closing this iterator before its end (or cancelling the task) cancels the job; a `break` alone closes
        it only at some later time, so use `contextlib.aclosing`.

        Raises RequestRefused, StreamFailed, ConnectionLost.
        """
        body = {**params, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True}}
        stream = _Stream(self, body)
        try:
            async with aclosing(stream.chunks()) as chunks:
                async for chunk in chunks:
                    yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            await stream.abandon()
            raise

    async def cancel(self, job: str) -> str:
        """End a job, wherever it runs; answers what it was: `waiting`, `running` or `ended`. Safe to repeat."""
        return str((await self._ask("DELETE", f"/v1/streams/{job}"))["was"])

    async def models(self) -> list[str]:
        """The names of the models that are served."""
        return [model["id"] for model in (await self._ask("GET", "/v1/models"))["data"]]

    async def _ask(self, method: str, path: str) -> Any:
        """What may be asked of any pod, and twice; raises what the last one said if none could answer."""
        for url in self.urls:
            with contextlib.suppress(httpx.TransportError):
                response = await self.http.request(method, url + path)
                if response.status_code == 200:
                    return response.json()
                refusal = _refusal(response)
                if response.status_code < 500 or url == self.urls[-1]:
                    raise refusal
        raise ConnectionLost(f"no answer from {', '.join(self.urls)}")


class _Interrupted(Exception):
    """This connection is over, the stream is not."""


class _NotTaken(Exception):
    """A pod could not take the request just now."""


class _Stream:
    """One job, as far as it has been read."""

    def __init__(self, client: Client, body: dict[str, Any]) -> None:
        self._client = client
        self._body = body
        self._url = 0
        self._key = secrets.token_hex(16)
        self._is_asked = False
        """A request was sent: there may be a job, also if its id has not come."""
        self._is_begun = False
        self._job = ""
        self._position = ""
        self._is_ended = False
        self._lost_at: float | None = None
        """When the connection was lost, if not a byte has come since."""
        self._tries = 0

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        while not self._is_ended:
            try:
                async with self._request() as response:
                    await self._begin(response)
                    async with aclosing(self._read(response)) as chunks:
                        async for chunk in chunks:
                            yield chunk
            except (httpx.TransportError, _Interrupted, _NotTaken) as error:
                await self._wait(error)

    async def abandon(self) -> None:
        """Cancel the job, if there is one that may still run; a server that cannot be reached ends it by itself."""
        if self._is_ended or not self._is_asked:
            return
        with contextlib.suppress(ClientError, httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(_CANCEL_S):
                if not self._job:
                    async with self._request() as response:
                        self._job = response.headers.get("x-request-id", "")
                if self._job:
                    await self._client.cancel(self._job)

    def _request(self) -> AbstractAsyncContextManager[httpx.Response]:
        client, url = self._client, self._client.urls[self._url]
        headers = {"x-on-disconnect": f"{min(client.give_up_s, _ON_DISCONNECT_MAX_S):g}"}
        if not self._job:
            self._is_asked = True
            headers["idempotency-key"] = self._key
            return client.http.stream("POST", f"{url}/v1/chat/completions", json=self._body, headers=headers)
        if self._position:
            headers["last-event-id"] = self._position
        return client.http.stream("GET", f"{url}/v1/streams/{self._job}", headers=headers)

    async def _begin(self, response: httpx.Response) -> None:
        """Look at the status: go on to read, try elsewhere, or raise what the server says."""
        if response.status_code == 200:
            if self._job:
                self._client.on_reconnect(self._client.urls[self._url])
            self._job = self._job or response.headers.get("x-request-id", "")
            self._is_begun = True
            return
        await response.aread()
        said = read_error(response.content)
        if self._job:
            if _is_passing(response.status_code, said):
                raise _Interrupted(f"HTTP {response.status_code}")
            self._fail(*(said or (f"http_{response.status_code}", "the stream cannot be resumed")))
        if (said is None and response.status_code >= 500) or (said and said[0] in ("broker_down", "unavailable")):
            raise _NotTaken(said[1] if said else f"HTTP {response.status_code}")
        if said and response.status_code >= 500 and "x-request-id" in response.headers:
            self._fail(*said)
        raise _refusal(response)

    async def _read(self, response: httpx.Response) -> AsyncGenerator[Chunk, None]:
        parser = sse.Parser()
        async for data in response.aiter_bytes():
            self._lost_at, self._tries = None, 0
            for event in parser.feed(data):
                if event.data == "[DONE]":
                    self._is_ended = True
                    return
                if (chunk := self._take(event)) is not None:
                    yield chunk
        raise _Interrupted("the body ended without [DONE]")

    def _take(self, event: sse.Event) -> Chunk | None:
        """One frame; None if there is nothing in it for a caller."""
        position = event.id or self._position
        try:
            frame = json.loads(event.data)
            said = error_in(frame)
            chunk = _chunk(frame, position) if said is None else Chunk("")
        except (ValueError, TypeError, LookupError, AttributeError):
            said = "invalid_frame", f"this is no frame of the chat format: {event.data[:80]!r}"
        if said is not None:
            self._fail(*said)
        self._position = position
        is_empty = not (chunk.text or chunk.reasoning or chunk.tool_calls or chunk.finish_reason or chunk.usage)
        return None if is_empty else chunk

    def _fail(self, code: str, message: str) -> NoReturn:
        self._is_ended = True
        raise StreamFailed(code, message)

    async def _wait(self, error: Exception) -> None:
        """Before the next connection, which is to the next pod: a random time, longer after each failure in a row."""
        if self._is_begun and not self._job:
            raise ConnectionLost("the response named no job, so it cannot be resumed") from error
        now = asyncio.get_running_loop().time()
        self._lost_at = now if self._lost_at is None else self._lost_at
        left_s = self._lost_at + self._client.give_up_s - now
        if left_s <= 0:
            raise ConnectionLost(f"no answer for {self._client.give_up_s:g} s: {error}") from error
        limit_s = min(_BACKOFF_MAX_S, self._client.backoff_s * 2 ** min(self._tries, _DOUBLINGS_MAX), left_s)
        self._tries += 1
        self._url = (self._url + 1) % len(self._client.urls)
        await asyncio.sleep(random.uniform(0, limit_s))


def _is_passing(status: int, said: tuple[str, str] | None) -> bool:
    """May a resume that was answered so be answered otherwise by another pod, or later?"""
    return status in (408, 429) or (status >= 500 and (said is None or said[0] in _PASSING))


def _refusal(response: httpx.Response) -> RequestRefused:
    """The error of a response that has been read; `Retry-After` may also be a date, which is left out."""
    code, message = read_error(response.content) or (f"http_{response.status_code}", response.reason_phrase)
    after = response.headers.get("retry-after", "")
    return RequestRefused(response.status_code, code, message, float(after) if after.isdecimal() else None)


def _chunk(frame: dict[str, Any], position: str) -> Chunk:
    choice = frame["choices"][0] if frame["choices"] else {}
    delta = choice.get("delta") or {}
    return Chunk(
        delta.get("content") or "",
        delta.get("reasoning_content"),
        choice.get("finish_reason"),
        frame.get("usage"),
        position,
        choice.get("index", 0),
        delta.get("tool_calls") or (),
    )
