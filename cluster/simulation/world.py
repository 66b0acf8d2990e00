"""What a simulation is told, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headrace.cluster.law import Signals
from headrace.cluster.simulation.trace import Trace

NEVER = float("inf")


@dataclass(frozen=True)
class ReplicaModel:
    """See `fleet`. The defaults are the standard replica of the documented tables."""

    prefill_tokens_per_s: float = 20_000.0
    slots: int = 64
    step_s: float = 0.025
    idle_step_share: float = 0.6
    kv_tokens: int = 400_000
    prefill_share: float = 2 / 3
    is_parallel: bool = False
    cache_tokens: int = 0
    """Room for prompts that may come again; see `prefix_fleet`."""


@dataclass(frozen=True)
class World:
    """What is around the replicas: how long they take to start, how they end, how they fail."""

    start_up_s: float = 30.0
    jitter: float = 0.2
    drain_s: float = 30.0
    failures_per_hour: float = 0.0
    lease_s: float = 5.0
    ttft_slo_s: float = 0.5
    ttft_slo_prefills: float = 1.5
    tpot_slo_s: float = 0.05
    max_replicas: int = 64
    seed: int = 0


class Policy(Protocol):
    """Who decides: asked every `period_s` simulated seconds for the number of replicas there should be."""

    period_s: float
    wants_p90: bool
    """Whether `Signals.ttft_p90` is to be filled in, which takes time."""

    def decide(self, signals: Signals) -> int: ...


class Replica:
    """One replica's state; its times and counts are those of its last event."""

    __slots__ = (
        "at",
        "begun_s",
        "decoding",
        "gone_s",
        "is_able",
        "is_draining",
        "is_ready",
        "job",
        "kv",
        "left",
        "number",
        "ordered_s",
        "orphans",
        "rate",
        "running",
        "served",
        "steps",
        "version",
    )

    def __init__(self, number: int, ordered_s: float) -> None:
        self.number = number
        self.ordered_s = ordered_s
        self.gone_s = NEVER
        self.is_ready = self.is_draining = self.is_able = False
        self.running = self.kv = self.version = self.served = 0
        self.job = -1
        """What it prefills, or -1; `left` of its tokens are to do."""
        self.left = 0.0
        self.steps = 0.0
        self.rate = 0.0
        self.at = 0.0
        self.begun_s = 0.0
        self.orphans: list[int] = []
        self.decoding: list[tuple[float, int, float]] = []
        """(the step count at which it ends, request, that at which it began)"""


@dataclass(frozen=True)
class Run:
    """What came of it, per request (seconds; NaN is never) and per replica."""

    trace: Trace
    world: World
    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    ttft_slo_s: NDArray[np.float64]
    targets: list[tuple[float, int]]
    """Each change of the wanted number: when, and to what."""
    lives: list[tuple[float, float]]
    """From when to when each replica was paid for, cut at the end of the trace."""
    thrown_away: int
    events: int

    @property
    def is_ttft_met(self) -> NDArray[np.bool_]:
        return self.ttft_s <= self.ttft_slo_s

    @property
    def is_tpot_met(self) -> NDArray[np.bool_]:
        return self.tpot_s <= self.world.tpot_slo_s

    @property
    def is_met(self) -> NDArray[np.bool_]:
        return self.is_ttft_met & self.is_tpot_met

    @property
    def replica_hours(self) -> float:
        return sum(end - begin for begin, end in self.lives) / 3600
