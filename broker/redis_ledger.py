"""See `ledger`: on Redis. Keys and notes are on shard 0, usage is counted on the shard of each job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from secrets import randbits
from typing import Protocol

import msgspec

from headrace.broker import api_keys, keys
from headrace.broker.api_keys import StoredKey
from headrace.broker.ledger import MAX_NOTES, AuditEntry, Noted, Used, total
from headrace.broker.nodes import Node

_VERSION = "version"
_NOTES_TTL_S = 90 * 86_400
_COUNTED = ("requests", "prompt_tokens", "completion_tokens")


class At(Protocol):
    """The server of a shard, and its errors as ours."""

    def __call__(self, shard: int) -> AbstractAsyncContextManager[Node]: ...


class RedisLedger:
    """See `Ledger`."""

    def __init__(self, at: At, shards: int) -> None:
        self._at = at
        self._shards = shards

    async def version(self) -> int:
        async with self._at(0) as node:
            return int(await node.redis.hget(keys.key("keys", 0), _VERSION) or 0)

    async def key(self, sha256: str) -> StoredKey | None:
        async with self._at(0) as node:
            data = await node.redis.hget(keys.key("keys", 0), sha256)
        return api_keys.decode(data) if data else None

    async def all_keys(self) -> list[StoredKey]:
        async with self._at(0) as node:
            rows = await node.redis.hgetall(keys.key("keys", 0))
        found = [api_keys.decode(data) for name, data in rows.items() if name != _VERSION.encode()]
        return sorted((stored for stored in found if stored), key=lambda stored: stored.created_ms)

    async def put_key(self, stored: StoredKey) -> None:
        fields = {stored.key.sha256: api_keys.encode(stored), _VERSION: randbits(53) + 1}
        async with self._at(0) as node:
            await node.redis.hset(keys.key("keys", 0), mapping=fields)

    async def note(self, entry: AuditEntry) -> None:
        key = keys.key("audit", 0)
        async with self._at(0) as node, node.redis.pipeline(transaction=False) as pipe:
            pipe.xadd(key, {"e": msgspec.msgpack.encode(entry)}, maxlen=MAX_NOTES, approximate=True)
            await pipe.expire(key, _NOTES_TTL_S).execute()

    async def notes(self, count: int) -> list[Noted]:
        async with self._at(0) as node:
            rows = await node.redis.xrevrange(keys.key("audit", 0), count=count)
        return [Noted(int(id.partition(b"-")[0]), _note_decoder.decode(fields[b"e"])) for id, fields in rows]

    async def usage(self, day: int) -> list[Used]:
        found: dict[tuple[int, str, str], dict[str, int]] = {}
        for shard in range(self._shards):
            async with self._at(shard) as node:
                row = await node.redis.hgetall(keys.key("usage", shard, str(day)))
            for name, value in row.items():
                kind, model, owner = name.decode().split("\t")
                found.setdefault((shard, owner, model), {})[kind] = int(value)
        return total(
            Used(day, owner, model, *(counts.get(kind, 0) for kind in _COUNTED))
            for (_, owner, model), counts in found.items()
        )

    async def usage_of(self, owner: str, models: Sequence[str], day: int) -> list[Used]:
        names = [f"{kind}\t{model}\t{owner}" for model in models for kind in _COUNTED]
        rows: list[Used] = []
        for shard in range(self._shards):
            async with self._at(shard) as node:
                row = await node.redis.hmget(keys.key("usage", shard, str(day)), names)
            counts = [int(count or 0) for count in row]
            rows += [Used(day, owner, model, *counts[3 * at : 3 * at + 3]) for at, model in enumerate(models)]
        return [used for used in total(rows) if used.requests]


_note_decoder = msgspec.msgpack.Decoder(AuditEntry)
