"""Which server holds a shard: the only one there is, or the one that Redis Cluster says, and the connections to each.

A shard's keys have one hash tag, so one slot, so one server. redis-py's own cluster client would find it too, but it
sends everything again after a break and opens as many connections as it is asked for; what is here keeps the rules of
a single server for each of many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import redis.asyncio as redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisError

from headrace.broker import keys, tls
from headrace.broker.calls import Calls
from headrace.broker.errors import BrokerDown
from headrace.broker.settings import RedisSettings

Address = tuple[str, int]

_POOL_WAIT_S = 30.0  # a burst of requests waits its turn; each command has a timeout of its own


class Node:
    """One server. `options` are how to reach it, as redis-py reads them out of a URL."""

    def __init__(self, options: dict[str, Any], settings: RedisSettings) -> None:
        common = {
            **options,
            "protocol": 2,
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": settings.timeout_s,
            "driver_info": None,  # a name for CLIENT LIST, which costs two commands and a right
        }
        retry = Retry(ConstantBackoff(0.05), 2)
        self._pool = redis.BlockingConnectionPool(
            max_connections=settings.pool_size, timeout=_POOL_WAIT_S, retry=retry, **common
        )
        self.pinned_pool = redis.ConnectionPool(retry=Retry(NoBackoff(), 0), **common)
        """The settings of pinned connections, for what must not be sent a second time after a break, unnoticed."""
        # Any: redis-py types each answer as the union of all that any server and protocol could say
        self.redis: Any = redis.Redis(connection_pool=self._pool)
        self.calls = Calls(self.pinned_pool, settings.timeout_s)

    async def let_go(self) -> None:
        """Give up the connections that nobody uses now: they lead to a server that is not the right one any more."""
        await self._pool.disconnect(inuse_connections=False)
        self.calls.let_go()

    async def close(self) -> None:
        self.calls.close()
        await self.redis.aclose()
        await self._pool.disconnect()
        await self.pinned_pool.disconnect()


class Nodes:
    """All servers of a deployment. `url` is the only one, or any one of a cluster."""

    def __init__(self, url: str, settings: RedisSettings) -> None:
        self._settings = settings
        self._options: dict[str, Any] = {**parse_url(url), **tls.options(url, settings)}
        self.first = Node(self._options, settings)
        self._known: dict[Address, Node] = {}
        self._places: dict[int, Node] = {}
        """Where each shard is, once that was asked."""
        self._asking = asyncio.Lock()

    async def of(self, shard: int) -> Node:
        """The server that holds a shard; raises BrokerDown if nobody says so."""
        if not self._settings.cluster:
            return self.first
        return (self._places or await self._ask())[shard]

    async def all(self) -> list[Node]:
        """Every server that holds something."""
        if not self._settings.cluster:
            return [self.first]
        return list(dict.fromkeys((self._places or await self._ask()).values()))

    def doubt(self) -> None:
        """Something was not where it should be, or did not answer: ask again before the next command."""
        self._places = {}

    async def _ask(self) -> dict[int, Node]:
        said: str | None = None
        async with self._asking:
            if self._places:
                return self._places
            for node in [*self._known.values(), self.first]:
                try:
                    rows = await node.redis.execute_command("CLUSTER SLOTS")
                    places = _places(list(_owners(rows, self._options)), self._settings.shards)
                except (RedisError, OSError, KeyError) as error:
                    said = said or tls.refusal(error)
                    continue
                await self._keep(set(places.values()))
                self._places = {shard: self._known[address] for shard, address in places.items()}
                return self._places
        raise BrokerDown(said or "no server says where the cluster's shards are", retry_after_s=1)

    async def _keep(self, addresses: set[Address]) -> None:
        for host, port in addresses - self._known.keys():
            self._known[host, port] = Node({**self._options, "host": host, "port": port}, self._settings)
        for address in self._known.keys() - addresses:
            await self._known.pop(address).let_go()

    async def close(self) -> None:
        for node in [self.first, *self._known.values()]:
            await node.close()


def _owners(rows: Any, options: dict[str, Any]) -> Iterator[tuple[int, int, Address]]:
    """First slot, last slot and primary of each range. https://redis.io/docs/latest/commands/cluster-slots/"""
    for first, last, primary, *_ in rows:
        host = primary[0].decode() if isinstance(primary[0], bytes) else primary[0]
        yield first, last, (host or options["host"], primary[1])  # no name: the one that was asked


def _places(owners: list[tuple[int, int, Address]], shards: int) -> dict[int, Address]:
    """Where each shard is; raises KeyError if a slot is nowhere."""
    found = {}
    for shard in range(shards):
        slot = key_slot(keys.base(shard).encode())
        places = [address for first, last, address in owners if first <= slot <= last]
        if not places:
            raise KeyError(slot)
        found[shard] = places[0]
    return found
