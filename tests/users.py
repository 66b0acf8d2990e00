"""The suite runs on servers with users: each part of a deployment logs in as what it is, and tests as who sees all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from itertools import cycle
from typing import Any, cast

import redis.asyncio as redis

from headrace.broker import acl
from headrace.broker.accounts import USERS
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.ledger import Ledger
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings

SECRET = "secret"


class Server(EmbeddedServer):
    """An embedded server that knows two more users.

    `url` is for one that has the rights of all parts of a deployment together, for tests that are pod and worker in
    one; `root_url` is for one that may do anything, for tests that look into the server and break it.
    """

    def __init__(self, data_dir: str) -> None:
        super().__init__(data_dir)
        self._ops_url = self.url
        self.url, self.root_url = (self.url_of(user) for user in ("everyone", "root"))

    def url_of(self, user: str) -> str:
        return super().url_of(user) if user in USERS else f"unix://{user}:{SECRET}@{self.socket}"

    async def start(self, timeout_s: float = 60.0) -> None:
        await super().start(timeout_s)
        everyone = [word for user in USERS for word in acl.rules(user) if word[0] in "+~%&("]
        client: Any  # redis-py does not type this
        async with redis.Redis.from_url(self._ops_url, protocol=2) as client:
            for user, words in (("everyone", everyone), ("root", ["~*", "&*", "+@all"])):
                await client.execute_command("ACL SETUSER", user, "on", f">{SECRET}", *words)


class ByUser:
    """A broker for tests: each verb is sent by who sends it in a deployment; in turns, if there are several."""

    def __init__(self, server: Server, settings: RedisSettings, queue: QueueSettings) -> None:
        self.root_url = server.root_url
        self.shards = settings.shards
        self._of = {user: RedisBroker(server.url_of(user), settings, queue) for user in USERS}
        self._turns = {verb: cycle(users.split()) for verb, users in SENDERS.items()}
        self.ledger = LedgerByUser({user: broker.ledger for user, broker in self._of.items()})

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._of[next(self._turns[verb])], verb)

    async def present(self, kind: str, *args: Any) -> None:
        await self._of[PRESENT[kind]].present(kind, *args)  # type: ignore[arg-type]

    async def absent(self, kind: str, *args: Any) -> None:
        await self._of[PRESENT[kind]].absent(kind, *args)  # type: ignore[arg-type]

    async def open(self) -> None:
        await self._each(lambda broker: broker.open())

    async def close(self) -> None:
        await self._each(lambda broker: broker.close())

    async def _each(self, do: Callable[[RedisBroker], Awaitable[None]]) -> None:
        for broker in self._of.values():
            await do(broker)


class LedgerByUser:
    """The same of its ledger."""

    def __init__(self, of: Mapping[str, Ledger]) -> None:
        self._of = of
        self._turns = {verb: cycle(users.split()) for verb, users in BOOKKEEPERS.items()}

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._of[next(self._turns[verb])], verb)


SENDERS = {
    "admit": "gateway ops", "claim": "worker", "tick": "worker", "release": "worker", "cancel": "gateway",
    "watch": "gateway", "unwatch": "gateway", "reap": "gateway worker", "status": "gateway ops", "job": "gateway",
    "forget": "gateway", "dead_letters": "gateway ops", "dead_letter": "ops", "expire": "ops", "secret": "gateway",
    "stats": "scaler gateway ops", "note_decision": "scaler",
    "note_unplaced": "scaler", "decisions": "gateway ops", "decided": "gateway",
    "lane": "worker", "last_ids": "worker", "read": "worker gateway", "read_after": "gateway",
    "listen_hints": "gateway", "listen_wakes": "worker", "listing": "gateway scaler ops",
    "ping": "gateway worker ops scaler",
}  # fmt: skip
"""Who sends each verb of the broker."""

BOOKKEEPERS = {
    "version": "gateway ops", "key": "gateway", "all_keys": "ops", "put_key": "ops", "note": "gateway ops",
    "notes": "ops", "usage": "ops", "usage_of": "gateway",
}  # fmt: skip
"""Who sends each verb of the ledger."""

PRESENT = {"pods": "gateway", "replicas": "worker", "cluster": "scaler"}


def by_user(server: Server, settings: RedisSettings, queue: QueueSettings) -> Broker:
    return cast(Broker, ByUser(server, settings, queue))
