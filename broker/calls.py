"""One Redis connection that many callers share: each command goes out at once, and answers come in its order.

What the verbs are called on. redis-py's pool gives each caller a connection of its own, which costs several times the
command; a server does one thing at a time anyhow. A break is told to all who wait, and each asks again on a new one:
verbs may be asked twice.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.broker.redis_wire import pack, take_over

_TRIES = 3
_AGAIN_S = 0.05


class _Wire(asyncio.Protocol):
    """A connection's answers, each to the oldest caller. One that has left is still in line: its answer comes too."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._reader = hiredis.Reader(replyError=connection._parser.parse_error, notEnoughData=...)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._line: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_retired = False
        self._transport: asyncio.Transport | None = None
        self.error: Exception | None = None
        """Why nothing may be asked here any more."""

    async def connect(self) -> None:
        self._transport = await take_over(self._connection, self)

    def ask(self, packed: bytes) -> asyncio.Future[Any]:
        assert self._transport is not None
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._line.append((answer, self._loop.time()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)
        self._transport.write(packed)
        return answer

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (said := self._reader.gets()) is not ...:
                answer, _ = self._line.popleft()
                if answer.done():
                    continue
                if isinstance(said, Exception):
                    answer.set_exception(said)
                else:
                    answer.set_result(said)
        except (hiredis.ProtocolError, IndexError) as error:
            self.end(RedisConnectionError(f"what the server says is no answer: {error}"))
        if self._is_retired:
            self.retire()

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(RedisConnectionError(str(exc or "the server has closed the connection")))

    def _look(self) -> None:
        """One timer for all: it looks at the oldest, and comes again for what is younger."""
        self._timer = None
        if not self._line:
            return
        left_s = self._line[0][1] + self._timeout_s - self._loop.time()
        if left_s <= 0:
            self.end(RedisTimeoutError("the server does not answer"))
        else:
            self._timer = self._loop.call_later(left_s, self._look)

    def end(self, error: Exception) -> None:
        """Close at once; this is what everyone who waits is told."""
        self.error = self.error or error
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
            self._connection._close()
        while self._line:
            answer, _ = self._line.popleft()
            if not answer.done():
                answer.set_exception(error)

    def retire(self) -> None:
        """Take no more, and close once all who wait have their answers."""
        self._is_retired = True
        self.error = self.error or RedisConnectionError("the connection was given up")
        if not self._line and self._transport is not None:
            self._connection._close()


class Calls:
    """See the module. `pool` says how to connect, and is asked for nothing else."""

    def __init__(self, pool: Any, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._is_closed = False
        self._connecting = asyncio.Lock()

    async def ask(self, *command: str | bytes | float) -> Any:
        """The server's answer; raises what redis-py would: an error answer, or after three breaks the break."""
        packed = pack(command)
        for left in reversed(range(_TRIES)):
            try:
                wire = self._wire
                if wire is None or wire.error is not None:
                    wire = await self._connected()
                return await wire.ask(packed)
            except (RedisConnectionError, RedisTimeoutError, OSError):
                if not left or self._is_closed:
                    raise
                await asyncio.sleep(_AGAIN_S)
        raise AssertionError("the last try has returned or raised")

    async def _connected(self) -> _Wire:
        async with self._connecting:
            if self._wire is not None and self._wire.error is None:
                return self._wire  # somebody else was faster
            wire = _Wire(self._pool.make_connection(), self._timeout_s)
            await wire.connect()
            self._wire = wire
            return wire

    def let_go(self) -> None:
        """The next command goes out on a new connection."""
        if self._wire is not None:
            self._wire.retire()
            self._wire = None

    def close(self) -> None:
        """Whoever still waits gets an error."""
        self._is_closed = True
        if self._wire is not None:
            self._wire.end(RedisConnectionError("the broker was closed"))
            self._wire = None
