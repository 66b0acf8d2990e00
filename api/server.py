"""One pod process: the application under uvicorn, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State

from headrace.api.app import create_app
from headrace.api.carrier import Carrier
from headrace.api.connection import Connection
from headrace.api.lingering import Meter, Unread, linger
from headrace.api.wire import BY_NAME
from headrace.broker import addresses
from headrace.broker.errors import BadRequest, ConfigError, HeadersTimeout, HeadersTooLarge, HeadraceError
from headrace.broker.models_file import ModelsFile
from headrace.broker.protocol import Broker
from headrace.broker.settings import ApiSettings, Settings
from headrace.broker.tasks import collect_less, loop_factory

_handshakes = logging.getLogger(f"{__name__}.handshakes")
_handshakes.setLevel(logging.WARNING)


class PodConnection(Connection):
    """A connection of uvicorn's; `cycle` is uvicorn's word for a request and its response."""

    def __init__(self, protocol: PodProtocol) -> None:
        super().__init__()
        self._protocol: Any = protocol

    def abort(self) -> None:
        self._protocol.transport.abort()

    def can_tell_lost(self) -> bool:
        cycle = self._protocol.cycle
        if cycle.more_body or cycle.disconnected:
            return False
        self._protocol.flow.resume_reading()  # a transport that does not read does not see its end either
        return True

    def can_write_chunk(self) -> bool:
        cycle = self._protocol.cycle
        return cycle.chunked_encoding and not self._protocol.flow.write_paused and not cycle.disconnected

    def write_chunk(self, data: bytes) -> None:
        self._protocol.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Together:
    """In the place of a transport while a response begins: its head waits for the first of its body.

    uvicorn writes them one by one, and each write is a system call that wakes the client.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
        else:
            self._transport.write(self._head + data)
            self._head, self.write = b"", self._transport.write  # type: ignore[method-assign]

    def close(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._transport.close()


class PodProtocol(HttpToolsProtocol):
    """HTTP as uvicorn reads it, and what it leaves open: half-closed connections, heads without end, unread bodies."""

    def __init__(self, *args: Any, limits: ApiSettings, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_head_bytes = limits.max_header_bytes
        self._head_timeout_s = limits.header_timeout_s
        self._head_since: float | None = time.monotonic()
        """Since when the head of a request, or a first request, is waited for; None while neither is."""
        self._meter = Meter()
        self._is_in_head = False
        self._is_lingering = False

    def eof_received(self) -> Any:
        """A client may close its writing side and go on reading; the response to a whole request says what that means.

        The connection stays until the response has ended. Anything else is closed, as usual.
        """
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        cycle.keep_alive = False  # nothing more will be asked on it
        Connection.of(cycle.scope).half_close()
        return True

    def data_received(self, data: bytes) -> None:
        """A head that is not complete is refused by its size here; the application sees only complete ones.

        So are trailers, and what may stand beside the bytes of a chunk.
        """
        if self._is_lingering:
            return
        super().data_received(data)
        if (self._is_in_head or self._meter.is_in_body) and not self.transport.is_closing():
            self._meter.read(len(data))
            if self._meter.idle_bytes > self._max_head_bytes:
                self._refuse(HeadersTooLarge())

    def on_message_begin(self) -> None:
        self._is_in_head, self._head_since = True, time.monotonic()
        self._meter = Meter()
        super().on_message_begin()
        PodConnection(self).enter(self.scope)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._max_head_bytes:
            raise ValueError("the address is too long")  # `send_400_response` follows

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer is no header: what decided about a request is not told after it."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head, self._head_since = False, None
        super().on_headers_complete()
        cycle: Any = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            self._meter.is_in_body = True
            cycle.transport = Unread(self.transport, self._linger)

    def on_body(self, body: bytes) -> None:
        self._meter.body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._meter.is_in_body = False
        cycle: Any = self.cycle
        if cycle is not None:
            has_no_body = cycle.response_started or cycle.scope["method"] == "HEAD"  # after which nothing would come
            cycle.transport = self.transport if has_no_body else Together(self.transport)
        super().on_message_complete()

    def check_head(self, now: float) -> None:
        """Called once a second: a head that has not come in time is refused; who has asked nothing is hung up on.

        One that is begun while an answer is under way has time until that is over.
        """
        if self._is_lingering or self._head_since is None or now - self._head_since <= self._head_timeout_s:
            return
        if not self._is_in_head:
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            self._refuse(HeadersTimeout(f"the headers did not arrive within {self._head_timeout_s:g} s"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            Connection.of(cycle.scope).lose()
        else:  # all that it was about holds each other, and would stay until Python's next collection
            self.cycle = self.scope = self.parser = None  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """Nobody will read the rest of a body whose request has been answered, and the next request is after it."""
        if self.cycle.more_body and not self.pipeline:
            self._linger()
        if self._is_lingering:
            self.server_state.total_requests += 1
        else:
            super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused in the same words as everything else."""
        is_long = self._is_in_head and len(self.url) > self._max_head_bytes
        self._refuse(HeadersTooLarge("the address is too long") if is_long else BadRequest(msg))

    def _refuse(self, error: HeadraceError) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle.response_started or self.pipeline:
                self.transport.abort()  # an answer is under way: another one in its midst would be taken for its text
                return
            cycle.disconnected = True  # this is its answer
            cycle.message_event.set()
            Connection.of(cycle.scope).lose()
        body = BY_NAME["openai.chat"].error_body(error)
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._linger()

    def _linger(self) -> None:
        self._is_lingering = True
        linger(self.transport, self.loop)


class SocketConnection(Connection):
    """A WebSocket of uvicorn's. What is written are lines; each is a message."""

    def __init__(self, protocol: PodWebSocket) -> None:
        super().__init__()
        self._protocol = protocol

    def abort(self) -> None:
        self._protocol.transport.abort()

    def can_write_chunk(self) -> bool:
        protocol = self._protocol
        return protocol.writable.is_set() and protocol.conn.state is State.OPEN and not protocol.transport.is_closing()

    def write_chunk(self, data: bytes) -> None:
        conn = self._protocol.conn
        for line in data.split(b"\n"):
            if line:
                conn.send_text(line)
        self._protocol.transport.write(b"".join(conn.data_to_send()))


class PodWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket as uvicorn carries it, but one that a pod which ends lets go on, like any other stream.

    uvicorn would close it at once; here its task is given `drain_s`, and closes it with 1001 then.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # what they log of a handshake shows its query, and the key that a subprotocol may carry
        self.logger = self.conn.logger = _handshakes
        self.conn.debug = False

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # it was a handshake
            SocketConnection(self).enter(self.scope)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # refused; uvicorn would call it an error of the application

    def shutdown(self) -> None:
        if self.close_sent or not self.handshake_complete:
            super().shutdown()


def bind(settings: Settings, port: int) -> socket.socket:
    """Take the port now, so that a port in use is a clear error before anything else starts."""
    host = settings.api.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only where the protocol is named; without it every reply waits 40 ms for an ACK
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"api.port: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def configure(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """How uvicorn carries a pod."""
    protocol: Any = partial(PodProtocol, limits=settings.api)
    return uvicorn.Config(
        Carrier(app),
        http=protocol,
        loop="none",
        ws=PodWebSocket,
        ws_max_size=settings.api.max_body_bytes,
        ws_ping_interval=settings.api.heartbeat_s,
        ws_ping_timeout=settings.api.heartbeat_s,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.api.drain_s)),
    )


class Server(uvicorn.Server):
    """uvicorn's, which leaves connections open whose client does not take what was written: the loop waits for them."""

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second."""
        if counter % 10 == 0:
            now = time.monotonic()
            for connection in list(self.server_state.connections):
                if isinstance(connection, PodProtocol):
                    connection.check_head(now)
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.config.app.state.pod.drain()  # type: ignore[union-attr]  # `configure` gives it an application
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


async def serve(settings: Settings, broker: Broker, listener: socket.socket, models: ModelsFile | None = None) -> None:
    """Run one pod on a bound socket."""
    host, port = listener.getsockname()[:2]
    app = create_app(settings, broker, f"http://{addresses.location(host, port)}", models)
    server = Server(configure(settings, app))
    collect_less()
    await server.serve(sockets=[listener])


def run(settings: Settings, broker: Broker, listener: socket.socket, models: ModelsFile | None = None) -> None:
    """`serve` on uvloop, where there is one."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, broker, listener, models))
