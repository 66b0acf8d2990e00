"""API keys: who they speak for and what they may. They stand in `headrace.yaml`, or the broker keeps them.

A key itself is nowhere: it is 256 random bits, so that its SHA-256 is enough to know it by and tells nothing of it.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, structs

from headrace.broker.limits import NONE, Limits
from headrace.broker.messages import Band

Scope = Literal["use", "metrics", "admin"]
"""Models and one's own jobs; `/metrics`; everybody's jobs, and what operations do."""

ID_DIGITS = 12
"""So many digits of its SHA-256 name a key where people must tell keys apart: they help nobody to guess it."""


class KeySettings(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An API key: who it speaks for, the SHA-256 of it in hex, and what it may.

    It only grows. A pod that does not know a field refuses the key: it would not keep to what the field says.
    """

    owner: str
    sha256: str
    ceiling: Band = "interactive"
    """The best band its requests may ask for."""
    weight: float = 1.0
    """Its owner's part of the work while others wait too: twice the weight is twice as many tokens."""
    max_waiting_jobs: int | None = None
    """How much of its owner's may wait per model and shard, as in `queue`; null for no bound but that."""
    max_waiting_bytes: int | None = None
    max_waiting_tokens: int | None = None
    scopes: tuple[Scope, ...] = ("use",)
    models: list[str] | None = None
    """The models it may use, and sees; null for all."""
    routes: list[str] | None = None
    """The addresses it may use, each with those below it (`/v1`); null for all. Its own jobs it may always read."""
    expires: Annotated[datetime, Meta(tz=True)] | None = None
    limits: Limits = NONE
    """Of this key alone."""
    owner_limits: Limits = NONE
    """Of all keys of its owner together, as seen by this one."""

    @property
    def id(self) -> str:
        return self.sha256[:ID_DIGITS]

    @property
    def is_limited(self) -> bool:
        return self.limits != NONE or self.owner_limits != NONE

    def has_expired(self, now_s: float) -> bool:
        return self.expires is not None and self.expires.timestamp() <= now_s

    def may_call(self, path: str) -> bool:
        """Is a route's path, as it is declared, below one of those that the key may use?"""
        return self.routes is None or any(
            path == route or path.startswith(f"{route.rstrip('/')}/") for route in self.routes
        )


class StoredKey(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A key as the broker keeps it; one that was revoked stays, so that a deployment without keys is not open again."""

    key: KeySettings
    created_ms: int
    revoked_ms: int | None = None

    def state(self, now_s: float) -> Literal["active", "expired", "revoked"]:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.key.has_expired(now_s) else "active"


def digest(token: str) -> str:
    """What a key is known by."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """A new key: 256 random bits."""
    return f"hr-{secrets.token_urlsafe(32)}"


def check(where: str, key: KeySettings, refuse: Callable[[str, object, str], None]) -> None:
    """Call `refuse` with the path, the value and the reason for each value that cannot be."""
    if len(key.sha256) != 64 or any(c not in "0123456789abcdef" for c in key.sha256):
        # not what stands there: it may be the key itself
        refuse(f"{where}.sha256", f"{len(key.sha256)} characters", "must be 64 lower-case hex digits")
    if not 1 <= len(key.owner) <= 128 or not key.owner.isprintable():
        refuse(f"{where}.owner", key.owner, "must be 1 to 128 printable characters")
    if not 0.001 <= key.weight <= 1000:
        refuse(f"{where}.weight", key.weight, "must be 0.001 to 1000")
    for name in ("max_waiting_jobs", "max_waiting_bytes", "max_waiting_tokens"):
        if (getattr(key, name) or 0) < 0:
            refuse(f"{where}.{name}", getattr(key, name), "must not be negative")
    for route in key.routes or ():
        if not route.startswith("/"):
            refuse(f"{where}.routes", route, "must begin with a slash")
    for part in ("limits", "owner_limits"):
        for name, value in structs.asdict(getattr(key, part)).items():
            if value is not None and not 1 <= value <= 2**53:
                refuse(f"{where}.{part}.{name}", value, "must be 1 or more")


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StoredKey)


def encode(stored: StoredKey) -> bytes:
    return _encoder.encode(stored)


def decode(data: bytes) -> StoredKey | None:
    """A stored key; None if it says what this build does not know, and so cannot keep to."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError:
        return None


def now_ms() -> int:
    return time.time_ns() // 1_000_000
