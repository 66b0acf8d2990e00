"""An oracle: it has seen the trace, and has replicas ready just where requests would else miss their SLO.

It is a search and not the optimum: from a flat plan, each round adds a replica in the five-second bins with most misses
and simulates again. A policy that is better than it at some point has found a better plan.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.cluster.law import Signals
from headrace.cluster.simulation.fleet import Fleet, ReplicaModel, Run, World
from headrace.cluster.simulation.trace import Trace

_BIN_S = 5.0
_ROUNDS = 14
_WORST = 0.25
"""Share of the bins with misses that get one more in a round."""
_JITTERED = 1.2


class Planned:
    """Follows a plan of how many are to be *ready* in each bin, and orders them a start-up time before."""

    period_s = 1.0
    wants_p90 = False

    def __init__(self, plan: NDArray[np.int64], start_up_s: float) -> None:
        lead = max(1, int(np.ceil(start_up_s * _JITTERED / _BIN_S)))
        padded = np.concatenate([plan, np.full(lead, plan[-1])])
        self._ordered = np.lib.stride_tricks.sliding_window_view(padded, lead + 1).max(axis=1)

    def decide(self, signals: Signals) -> int:
        return int(self._ordered[min(int(signals.at_s / _BIN_S), len(self._ordered) - 1)])


def search(trace: Trace, model: ReplicaModel, world: World, flat: int) -> Iterator[Run]:
    """Runs of better and dearer plans, the first one with `flat` replicas all the time."""
    bins = int(trace.span_s / _BIN_S) + 1
    plan = np.full(bins, flat, dtype=np.int64)
    for _ in range(_ROUNDS):
        policy = Planned(plan, world.start_up_s)
        run = Fleet(trace, model, world, policy, policy.decide(Signals(at_s=0.0))).run()
        yield run
        missed = np.bincount((trace.arrival_s[~run.is_met] / _BIN_S).astype(int), minlength=bins).astype(float)
        if not missed.any():
            return
        # capacity in the bin before mends a miss, too
        missed[:-1] += missed[1:]
        worst = np.sort(missed[missed > 0])[::-1]
        plan = np.minimum(plan + (missed >= worst[int(len(worst) * _WORST)]), world.max_replicas)
