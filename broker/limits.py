"""How much an API key may ask for, and how much its owner may with all keys together.

Whoever has any limit has a home shard, a function of the owner: all jobs of that owner are there, so that `admit`
counts them exactly and in the same step, whatever the number of shards.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from msgspec import Struct


class Limits(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Null is no limit. Requests and tokens a minute are buckets of that size, which fill up again within a minute.

    Tokens are those of the prompt and of the answer: as estimated at admission, then as they were.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    """Of the day in UTC."""
    max_jobs: int | None = None
    """Requests that wait or run at once."""
    max_streams: int | None = None
    """Those among them that stream."""


NONE = Limits()


class Allowance(Struct, frozen=True):
    """What `admit` must keep to: the limits of a key, by its id, and those of its owner."""

    key: str
    of_key: Limits = NONE
    of_owner: Limits = NONE


class Bucket(NamedTuple):
    """How a limit stands: what it holds, what is left of it, and when it will be whole again."""

    limit: int
    left: int
    reset_ms: int


class Standing(NamedTuple):
    """The tighter limit of a key and its owner, in requests and in tokens a minute; None where there is none."""

    requests: Bucket | None = None
    tokens: Bucket | None = None


def home_shard(owner: str, shards: int) -> int:
    """Where the jobs of an owner with limits are."""
    return zlib.crc32(owner.encode()) % shards
