"""An oracle: it has seen the trace, and adds replicas just where requests would miss their SLO."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headrace.cluster.law import Signals
from headrace.cluster.simulation.fleet import Fleet, ReplicaModel, Run, World
from headrace.cluster.simulation.trace import Trace

BIN_S = 5.0


class Planned:
    """Follows a plan of the number that should be *ready* in each bin; orders as early as the start-up takes."""

    period_s = 1.0
    wants_p90 = False

    def __init__(self, plan: NDArray[np.int64], start_up_s: float) -> None:
        # a replica that is wanted in a bin is ordered before it, and stays between two wants that lie closer than that
        self._lead = max(1, int(np.ceil(start_up_s * 1.2 / BIN_S)))
        self._plan = _ordered(plan, self._lead)

    def decide(self, signals: Signals) -> int:
        index = min(int(signals.at_s / BIN_S), len(self._plan) - 1)
        return int(self._plan[index])


def _ordered(plan: NDArray[np.int64], lead: int) -> NDArray[np.int64]:
    padded = np.concatenate([plan, np.full(lead, plan[-1])])
    return np.array([padded[index : index + lead + 1].max() for index in range(len(plan))])


def plans(trace: Trace, model: ReplicaModel, world: World, rounds: int = 60) -> list[Run]:
    """Runs of better and better plans: each round adds a replica where most misses are, and keeps what it has."""
    bins = int(trace.span_s / BIN_S) + 1
    plan = np.ones(bins, dtype=np.int64)
    runs: list[Run] = []
    for _ in range(rounds):
        policy = Planned(plan, world.start_up_s)
        initial = policy.decide(Signals(at_s=0.0))
        run = Fleet(trace, model, world, policy, initial).run()
        runs.append(run)
        missed = trace.arrival_s[~run.is_met]
        if len(missed) == 0:
            break
        counts = np.bincount((missed / BIN_S).astype(int), minlength=bins).astype(float)
        counts = counts[:bins]
        # a miss is mended by capacity in the bins before it, too: spread it over the backlog that caused it
        spread = counts + np.concatenate([counts[1:], [0.0]])
        worst = np.sort(spread[spread > 0])[::-1]
        cut = worst[min(len(worst) - 1, max(0, int(len(worst) * 0.25)))]
        plan = plan + (spread >= max(cut, 1e-9))
        plan = np.minimum(plan, world.max_replicas)
    return runs
