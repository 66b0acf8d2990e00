"""Small worlds for the law: signals by hand, and a fleet of equal jobs on a simulated clock."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from headrace.cluster import law
from headrace.cluster.law import Config, Decision, Signals, State
from headrace.cluster.simulation.fleet import Fleet, ReplicaModel, Run, World
from headrace.cluster.simulation.sweep import Headrace
from headrace.cluster.simulation.trace import Trace, of


def decide_over(
    readings: list[Signals | None], config: Config, state: State | None = None
) -> tuple[list[Decision], State]:
    """The law's decisions on one reading after another."""
    state, made = state or State(), []
    for signals in readings:
        decision = law.desired(signals, state, config)
        made.append(decision)
        state = decision.state
    return made, state


def quiet(seconds: int, begin_s: float = 0.0, **fields: Any) -> list[Signals | None]:
    """The same reading once a second."""
    base = Signals(at_s=0.0, **fields)
    return [replace(base, at_s=begin_s + second) for second in range(seconds)]


def even(rate: float, seconds: float, input_tokens: int, output_tokens: int, begin_s: float = 0.0) -> Trace:
    """Equal requests at equal distances."""
    at = begin_s + np.arange(int(rate * seconds)) / rate
    count = len(at)
    return of("even", at, np.full(count, input_tokens), np.full(count, output_tokens))


def joined(*traces: tuple[float, Trace]) -> Trace:
    """Traces one after the other, each from its own second on."""
    at = np.concatenate([begin + each.arrival_s for begin, each in traces])
    inputs = np.concatenate([each.input_tokens for _, each in traces])
    outputs = np.concatenate([each.output_tokens for _, each in traces])
    return of("joined", at, inputs, outputs)


class Watched(Headrace):
    """Our law as the simulator drives it; it keeps what it saw."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[Signals] = []

    def decide(self, signals: Signals) -> int:
        self.seen.append(signals)
        return super().decide(signals)


def played(trace: Trace, model: ReplicaModel, world: World, policy: Any, initial: int) -> Run:
    return Fleet(trace, model, world, policy, initial).run()


def times_of(run: Run, direction: int) -> list[float]:
    """When the wanted number went up (1) or down (-1)."""
    pairs = zip(run.targets, run.targets[1:], strict=False)
    return [at for (_, before), (at, after) in pairs if (after > before) - (after < before) == direction]
