"""One Redis connection that stays itself: it is never swapped for another, and a break is an error the caller sees.

redis-py's pools give any free connection, and reconnect by themselves; two steps of one stream could then overtake each
other. The log's writers and the subscribers need the opposite. redis-py still makes the connection (TLS, login,
timeouts); from then on answers are parsed where they arrive, all of one read at once, and nobody wakes before the last.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

import hiredis
from redis.exceptions import RedisError, ResponseError

from headrace.broker import tls
from headrace.broker.errors import BrokerDown
from headrace.broker.nodes import Nodes
from headrace.broker.redis_wire import Command, pack, take_over


class _Wire(asyncio.Protocol):
    """The answers of a connection, in order. One caller waits at a time."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(replyError=ResponseError, notEnoughData=...)
        self._answers: deque[Any] = deque()
        self._wanted = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not ...:
                self._answers.append(answer)
        except hiredis.ProtocolError as error:
            self.connection_lost(error)
        if len(self._answers) >= self._wanted:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or exc or ConnectionError("the server has closed the connection")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, count: int, timeout_s: float | None) -> list[Any]:
        """The next `count` answers; raises TimeoutError, or OSError if the connection is gone before they are here."""
        if len(self._answers) < count:
            await self._wait(count, timeout_s)
        if len(self._answers) < count:
            raise self._error or TimeoutError
        return [self._answers.popleft() for _ in range(count)]

    async def _wait(self, count: int, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._wanted, self._waiter = count, loop.create_future()
        # a timer alone is much cheaper than wait_for, which this is called too often for
        timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
        try:
            if self._error is None:
                await self._waiter
        finally:
            self._wanted, self._waiter = 0, None
            if timer is not None:
                timer.cancel()


class Pinned:
    """A connection to the server of a shard, of no pool. Raises BrokerDown and is closed on any break."""

    def __init__(self, nodes: Nodes, shard: int) -> None:
        self._nodes = nodes
        self._shard = shard
        self._pool = nodes.first.pinned_pool
        self._connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        self._transport: asyncio.Transport | None = None
        self._wire = _Wire()

    async def send(self, commands: Sequence[Command]) -> None:
        """Write all commands at once, connecting first if need be."""
        await self.write(b"".join(map(pack, commands)))

    async def write(self, packed: bytes) -> None:
        """Write commands that are bytes already.

        A break that came while nobody waited is told here: to connect again as if nothing had been would leave a hole
        in a log whose end the server has lost meanwhile.
        """
        if self._transport is not None and self._transport.is_closing():
            await self.leave()
            raise BrokerDown("the connection was lost", retry_after_s=1)
        if self._transport is None:
            await self._connect()
        cast(asyncio.Transport, self._transport).write(packed)

    async def _connect(self) -> None:
        await self.close()
        pool = (await self._nodes.of(self._shard)).pinned_pool
        if pool is not self._pool:  # in a cluster, the shard's server is another one now
            self._pool, self._connection = pool, pool.make_connection()  # type: ignore[no-untyped-call]
        self._wire = _Wire()
        try:
            self._transport = await take_over(self._connection, self._wire)
        except (TimeoutError, RedisError, OSError) as error:
            await self.leave()
            raise BrokerDown(tls.refusal(error) or "") from error

    async def receive(self, timeout_s: float | None = None) -> Any:
        """The next answer, None if it does not come in the time that is given; an error answer is returned."""
        try:
            [answer] = await self._wire.take(1, timeout_s)
        except TimeoutError:
            return None
        except OSError as error:
            await self.leave()
            raise BrokerDown from error
        return answer

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands in one write and wait for all answers."""
        await self.send(commands)
        return await self.answers(len(commands))

    async def answers(self, count: int) -> list[Any]:
        """The next `count` answers, within the connection's own timeout."""
        try:
            return await self._wire.take(count, self._connection.socket_timeout)
        except (TimeoutError, OSError) as error:
            await self.leave()
            raise BrokerDown from error

    async def close(self) -> None:
        self._transport = None
        await self._connection.disconnect(nowait=True)

    async def leave(self) -> None:
        """Close it because of what the server did or said; the next connection may go to another."""
        await self.close()
        self._nodes.doubt()
