"""What the broker keeps beside jobs: API keys, who did what with them, and what each owner has used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from secrets import randbits
from typing import NamedTuple, Protocol

from msgspec import Struct

from headrace.broker.api_keys import StoredKey

DAY_MS = 86_400_000
MAX_NOTES = 10_000


class AuditEntry(Struct, frozen=True, array_like=True):
    """Who did what to what; it never says a secret."""

    actor: str
    action: str
    subject: str
    detail: str = ""


class Noted(NamedTuple):
    """An entry, and when it was kept, in epoch ms."""

    at_ms: int
    entry: AuditEntry


class Used(NamedTuple):
    """What an owner has used of a model on a day (since 1970, in UTC)."""

    day: int
    owner: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int


class Ledger(Protocol):
    """See the module; all raise `BrokerDown` as the verbs of `protocol.Broker` do."""

    async def version(self) -> int:
        """Another number after each change of a key; 0 if there never was one."""
        ...

    async def key(self, sha256: str) -> StoredKey | None: ...

    async def all_keys(self) -> list[StoredKey]:
        """Every key that was ever made, oldest first."""
        ...

    async def put_key(self, stored: StoredKey) -> None:
        """Make or change a key; safe to repeat."""
        ...

    async def note(self, entry: AuditEntry) -> None:
        """Keep what somebody did, for 90 days and among the last ten thousand."""
        ...

    async def notes(self, count: int) -> list[Noted]:
        """The last that were kept, newest first."""
        ...

    async def usage(self, day: int) -> list[Used]:
        """What every owner has used on a day, in jobs that ended on it; it is kept for 35 days."""
        ...

    async def usage_of(self, owner: str, models: Sequence[str], day: int) -> list[Used]:
        """The same of one owner and these models; those that were not used are absent."""
        ...


class MemoryLedger:
    """See `Ledger`."""

    def __init__(self, accounts: Callable[[], Iterable[Accounts]]) -> None:
        self._accounts = accounts
        self._keys: dict[str, StoredKey] = {}
        self._version = 0
        self._notes: list[Noted] = []

    async def version(self) -> int:
        return self._version

    async def key(self, sha256: str) -> StoredKey | None:
        return self._keys.get(sha256)

    async def all_keys(self) -> list[StoredKey]:
        return sorted(self._keys.values(), key=lambda stored: stored.created_ms)

    async def put_key(self, stored: StoredKey) -> None:
        self._keys[stored.key.sha256] = stored
        self._version = randbits(53) + 1

    async def note(self, entry: AuditEntry) -> None:
        self._notes.insert(0, Noted(time.time_ns() // 1_000_000, entry))
        del self._notes[MAX_NOTES:]

    async def notes(self, count: int) -> list[Noted]:
        return self._notes[:count]

    async def usage(self, day: int) -> list[Used]:
        rows = [(who, used) for shard in self._accounts() for who, used in shard.usage.get(day, {}).items()]
        return total(Used(day, owner, model, *used) for (model, owner), used in rows)

    async def usage_of(self, owner: str, models: Sequence[str], day: int) -> list[Used]:
        return [used for used in await self.usage(day) if used.owner == owner and used.model in models]


class Accounts(Protocol):
    """What one shard in memory has counted."""

    usage: dict[int, dict[tuple[str, str], tuple[int, int, int]]]


def total(rows: Iterable[Used]) -> list[Used]:
    """What was counted on several shards, as one row for each owner and model; by owner, then model."""
    sums: dict[tuple[int, str, str], list[int]] = {}
    for day, owner, model, *counts in rows:
        found = sums.setdefault((day, owner, model), [0, 0, 0])
        found[:] = [one + other for one, other in zip(found, counts, strict=True)]
    return [Used(*who, *counts) for who, counts in sorted(sums.items())]
