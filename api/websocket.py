"""`/ws/chat`: a WebSocket as one more carrier of a stream.

The first message asks; the answer is the response that HTTP would give, in the plain format's lines, one a message. So
leases, heartbeats, slow clients and draining are those of `relay.StreamReply`, which does not know what carries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.api import auth, origins, request_log, requests, submit
from headrace.api.body import check_depth
from headrace.api.connection import Connection
from headrace.api.pod import Pod
from headrace.api.reply import ClientGone, Reply
from headrace.api.submit import Place
from headrace.api.wire import BY_NAME, sse
from headrace.broker import errors, metrics
from headrace.broker.errors import BadRequest, BodyTimeout, Draining, HeadraceError, OriginNotAllowed

log = logging.getLogger(__name__)

DONE, GOING_AWAY, REFUSED, FAILED, OVERLOADED = 1000, 1001, 1008, 1011, 1013

_HEADERS = {"on_disconnect": b"x-on-disconnect", "priority": b"x-priority", "queue_timeout": b"x-queue-timeout"}
"""Members of the first message that say what headers say over HTTP."""


class Order(Struct, frozen=True):
    """What may be said while a stream is under way."""

    stop: bool | None = None
    ping: Any = None


_first_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_order_decoder = msgspec.json.Decoder(Order)


class _Carrier(Connection):
    """The connection under a stream. One that a pod ends because it ends itself is not cut: it gets a close frame."""

    def __init__(self, pod: Pod, under: Connection) -> None:
        super().__init__()
        self._pod = pod
        self._under = under

    def abort(self) -> None:
        if not self._pod.is_draining:
            self._under.abort()

    def can_write_chunk(self) -> bool:
        return self._under.can_write_chunk()

    def write_chunk(self, data: bytes) -> None:
        self._under.write_chunk(data)


class _Waiting:
    """A client that has not asked anything yet: a pod that ends does not wait for it."""

    is_writing = False

    def __init__(self, pod: Pod, message: asyncio.Future[Message]) -> None:
        self._pod = pod
        self.message = message

    def beat(self, now: float) -> None:
        if self._pod.is_draining:
            self.message.cancel()


class Conversation:
    """One connection: one request, and its answer."""

    def __init__(self, pod: Pod, socket: WebSocket) -> None:
        self._pod = pod
        self._socket = socket
        self._asked = HTTPConnection(socket.scope)
        self._form = BY_NAME["plain.ndjson"]
        self._job_id = ""
        self._is_stopped = False

    async def run(self) -> None:
        """Serve the connection to its end; a client that leaves, at any point, is no error."""
        try:
            if await self._accept():
                await self._serve()
        except (WebSocketDisconnect, ClientGone):
            pass
        except asyncio.CancelledError:
            if not self._pod.is_draining:
                raise
            await self._close(GOING_AWAY)

    # -- before the stream ----------------------------------------------------------------------------------------

    async def _accept(self) -> bool:
        """Refuse by an HTTP status what needs no message to be refused."""
        socket, offered = self._socket, self._socket.scope["subprotocols"]
        try:
            if not origins.is_welcome(socket, self._pod.settings.api.origins):
                raise OriginNotAllowed
            if isinstance(self._pod.trouble, Draining):
                raise self._pod.trouble
        except HeadraceError as error:
            metrics.REJECTIONS.labels(error.code).inc()
            body = self._form.error_body(error)
            request_log.refused(socket, error, error.status)
            await socket.send_denial_response(Response(body, error.status, media_type="application/json"))
            return False
        # a browser wants one of what it offered, and a key is not to be shown
        await socket.accept(next((each for each in offered if not each.startswith(auth.BEARER)), None))
        return True

    async def _serve(self) -> None:
        try:
            first = await self._first()
            Connection.of(self._socket.scope).received_at = time.monotonic()
            place = await self._place(first)
        except HeadraceError as error:
            metrics.REJECTIONS.labels(error.code).inc()
            request_log.refused(self._asked, error, error.status)
            await self._say(self._form.error_body(error))
            await self._close(_code(error))
            return
        self._job_id = place.subject.job_id
        reply = place.stream
        scope = {**self._socket.scope}
        _Carrier(self._pod, Connection.of(scope)).enter(scope)
        await reply.serve(scope, self._receive, self._send)
        await self._close(self._end(reply))

    async def _first(self) -> bytes:
        limit_s = self._pod.settings.api.body_timeout_s
        waiting = _Waiting(self._pod, asyncio.ensure_future(self._socket.receive()))
        self._pod.beats.add(waiting)
        try:
            async with asyncio.timeout(limit_s):
                message = await waiting.message
        except TimeoutError as error:
            raise BodyTimeout(f"the first message did not arrive within {limit_s:g} s") from error
        finally:
            self._pod.beats.remove(waiting)
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        return _bytes_of(message)

    async def _place(self, body: bytes) -> Place:
        """What the first message asks for: a new job, or the rest of one that is there."""
        limits, shards = self._pod.settings.api, self._pod.broker.shards
        check_depth(body, limits)
        try:
            fields = _first_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise BadRequest(f"The first message must be a JSON object: {error}.") from error
        for name, header in _HEADERS.items():
            if name in fields:
                self._add_header(header, _plain_value(name, fields.pop(name)))
        if bytes(fields.get("stream", msgspec.Raw(b"true"))) not in (b"true", b"null"):
            raise BadRequest("A WebSocket always streams.", param="stream")
        try:
            if "resume" in fields:
                if len(fields) > 1:
                    raise BadRequest("resume stands alone: the request is known already.", param="resume")
                cut = requests.position(_text(fields["resume"]), shards)
                return await submit.attach(self._pod, self._asked, cut.job_id, self._form, cut)
            return await submit.admit(self._pod, self._asked, self._form, sse.encode(fields))
        except HeadraceError as error:
            raise _renamed(error) from error

    def _add_header(self, name: bytes, value: str) -> None:
        """What a message says in place of a header: from here on it is one."""
        scope = self._asked.scope
        headers = [*scope["headers"], (name, value.encode("latin-1", "replace"))]
        self._asked = HTTPConnection({**scope, "headers": headers})

    # -- the stream: what `StreamReply` is told and what it says, as messages ----------------------------------------

    async def _receive(self) -> Message:
        """Wait until the client leaves; do what it says until then."""
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            with contextlib.suppress(WebSocketDisconnect):
                try:
                    await self._obey(message)
                except HeadraceError as error:
                    await self._warn(error)
        return {"type": "http.disconnect"}

    async def _obey(self, message: Message) -> None:
        try:
            data = _bytes_of(message)
            check_depth(data, self._pod.settings.api)
            order = _order_decoder.decode(data)
        except msgspec.MsgspecError:
            order = Order()
        if order.ping is not None:
            await self._say(sse.encode({"pong": order.ping}))
        elif order.stop:
            self._is_stopped = True
            await self._pod.cancel(self._job_id, "stop")
        else:
            raise BadRequest("While a stream is under way, only stop and ping may be said.")

    async def _warn(self, error: HeadraceError) -> None:
        """An error of a message, not of the stream, which goes on."""
        await self._say(sse.encode({"error": {"code": error.code, "message": error.message}, "done": False}))

    async def _send(self, message: Message) -> None:
        try:
            for line in message.get("body", b"").split(b"\n"):
                if line:
                    await self._say(line)
        except WebSocketDisconnect as error:
            raise ClientGone from error

    async def _say(self, line: bytes) -> None:
        await self._socket.send({"type": "websocket.send", "text": line.decode()})

    # -- the end --------------------------------------------------------------------------------------------------

    def _end(self, reply: Reply) -> int:
        if reply.outcome == "drained":
            return GOING_AWAY
        if reply.outcome == "ok" or self._is_stopped:
            return DONE
        return _code(errors.from_failure(reply.outcome))

    async def _close(self, code: int) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it is closed already
            await self._socket.close(code)


def _bytes_of(message: Message) -> bytes:
    text = message.get("text")
    return text.encode() if text is not None else cast(bytes, message.get("bytes") or b"")


def _plain_value(name: str, raw: msgspec.Raw) -> str:
    value = msgspec.json.decode(raw)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadRequest(f"{name} must be a text or a number.", param=name)
    return str(value)


def _text(raw: msgspec.Raw) -> str:
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.ValidationError as error:
        raise BadRequest("resume must be a position: the id of the last object.", param="resume") from error


def _renamed(error: HeadraceError) -> HeadraceError:
    """An error that names a header names the member that said it."""
    names: Mapping[str, str] = {header.decode(): name for name, header in _HEADERS.items()} | {
        "last-event-id": "resume"
    }
    if error.param is not None and (name := names.get(error.param.lower())):
        return type(error)(error.message, param=name, retry_after_s=error.retry_after_s)
    return error


def _code(error: HeadraceError) -> int:
    """The close code of an error, by its kind."""
    if error.status in (429, 503):
        return OVERLOADED
    return REFUSED if error.status < 500 and not isinstance(error, errors.JobEnded) else FAILED
