"""One pod process: the application under uvicorn, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.api.app import create_app
from headrace.broker.errors import ConfigError
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings


class HalfCloseProtocol(HttpToolsProtocol):
    """A client may close its writing side and go on reading; only a stream can find out whether it still does."""

    def eof_received(self) -> Any:
        """Keep the connection of a running stream open, and have it write; anything else is closed, as usual."""
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or "headrace.half_closed" not in cycle.scope:
            return None
        cycle.scope["headrace.half_closed"]()
        return True


def bind(settings: Settings, port: int) -> socket.socket:
    """Take the port now, so that a port in use is a clear error before anything else starts."""
    host = settings.api.host
    if not settings.keys and host not in ("127.0.0.1", "::1", "localhost"):
        raise ConfigError(f"api.host: {host!r} is open to others, but there are no keys; add `keys`, or bind 127.0.0.1")
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


async def serve(settings: Settings, broker: Broker, listener: socket.socket) -> None:
    """Run one pod on a bound socket."""
    host, port = listener.getsockname()[:2]
    config = uvicorn.Config(
        create_app(settings, broker, f"http://{host}:{port}"),
        http=HalfCloseProtocol,
        loop="none",
        ws="none",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(settings.api.drain_s)),
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def run(settings: Settings, broker: Broker, listener: socket.socket) -> None:
    """`serve` on uvloop, where there is one."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(settings, broker, listener))


def loop_factory() -> Any:
    """uvloop's loops if it is installed (it is not on Windows), else None for asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
