"""One Redis connection that stays itself: it is never swapped for another, and a break is an error the caller sees.

redis-py's pools give any free connection, and reconnect by themselves; two steps of one stream could then overtake each
other. The log's writers and the subscribers need the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis
from redis.exceptions import RedisError, ResponseError

from headrace.broker.errors import BrokerDown

Command = Sequence[str | bytes | int]


class Pinned:
    """A connection out of a pool's settings, but not of the pool. Raises BrokerDown and is closed on any break."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]

    async def send(self, commands: Sequence[Command]) -> None:
        """Write all commands at once, connecting first if need be."""
        try:
            await self._connection.connect()
            await self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        except (TimeoutError, RedisError, OSError) as error:
            await self.close()
            raise BrokerDown from error

    async def receive(self, timeout_s: float | None = None) -> Any:
        """The next answer, None if it does not come in the time that is given; an error answer is returned."""
        try:
            return await self._connection.read_response(timeout=timeout_s)
        except ResponseError as error:
            return error
        except (TimeoutError, RedisError, OSError) as error:
            await self.close()
            raise BrokerDown from error

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands in one write and wait for all answers."""
        await self.send(commands)
        return [await self.receive() for _ in commands]

    async def close(self) -> None:
        await self._connection.disconnect(nowait=True)
