"""Who is next and what leaves the queue of `memory.MemoryBroker`: the counterparts of the hashes `fair` and `drain`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.broker.protocol import Share
from headrace.broker.settings import QueueSettings

DRAIN_MS = 30_000
FORGET_MS = 10 * DRAIN_MS
MAX_SHED = 16
"""Batch jobs that end for one that comes."""

Load = tuple[int, int, int]
"""What waits, in jobs, bytes and prompt tokens."""


@dataclass
class Fair:
    """Start-time fair queueing in one band of a model, while anything waits there; see `lib.lua`."""

    virtual: float = 0.0
    finishes: dict[str, float] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)

    def start_tag(self, owner: str, charge: float) -> float:
        start = max(self.virtual, self.finishes.get(owner, 0.0), self.starts.get(owner, 0.0))
        self.finishes[owner], self.starts[owner] = start + charge, start
        return start

    def advance(self, start: float) -> None:
        self.virtual = max(self.virtual, start)

    def correct(self, owner: str, charge: float) -> None:
        if owner in self.finishes:
            self.finishes[owner] = max(self.virtual, self.finishes[owner] + charge)


@dataclass
class Drain:
    """Jobs that were claimed, older ones weighing less."""

    count: float
    at_ms: int

    def decayed(self, now: int) -> float:
        return self.count * math.exp((self.at_ms - now) / DRAIN_MS)


def is_full(waiting: Load, bounds: Sequence[int | None], share: float = 1.0) -> bool:
    return any(bound is not None and has >= bound * share for has, bound in zip(waiting, bounds, strict=True))


def bounds_of(limits: QueueSettings | Share) -> tuple[int | None, int | None, int | None]:
    return limits.max_waiting_jobs, limits.max_waiting_bytes, limits.max_waiting_tokens


def retry_after_s(jobs: int, drain: Drain | None, now: int) -> int:
    if drain is None or now - drain.at_ms >= FORGET_MS:
        return 5
    return max(1, min(60, math.ceil(0.1 * jobs / (drain.decayed(now) / (DRAIN_MS / 1000)))))
