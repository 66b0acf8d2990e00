"""What would have happened with another number of replicas: a shadow queue for each, fed with what really arrives.

A shadow queue of n replicas holds seconds of prefill; n seconds of it are done each second. A prompt waits while all n
are at work, which is about when more is there than n - 1 of them still have of what they do; a prompt that waits longer
than its slack counts as missed. (A fluid model of the multi-server queue; `docs/autoscaling.md` compares it to the
simulator's replicas.)

The counts are kept by *situation*, which is the load (on a logarithmic scale) at the time when a replica would have had
to be ordered to be there now. So what is learned is: with this load now, so many replicas will be needed a start-up
time from now. All of it is pure: functions from a `Shadows` to the next.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from msgspec import Struct

_SITUATIONS, _LOWEST, _RATIO = 24, 0.03, 1.5
"""Situation 0 is up to `_LOWEST` replicas of load, each next one reaches `_RATIO` times as far."""
_EVERY = 10
"""Calls between two plans."""
_ENOUGH_S = 60.0
"""Nothing is planned before so much has been seen, and a situation is unknown that has not lasted for so long."""
_BORROWED_S = 100.0
_STRICT = 0.5
_NEAR = 0.5
"""A situation borrows so much less from each next one."""
_EXACT, _GROWTH = 32, 1.15
"""Every number up to the first has a shadow, above it they grow by the second."""
_LARGE = 1e6


class Shadows(Struct, frozen=True):
    """`numbers[i]` replicas have the backlog `backlogs[i]`, in seconds of prefill."""

    numbers: tuple[int, ...] = ()
    backlogs: tuple[float, ...] = ()
    counts: tuple[tuple[float, ...], ...] = ()
    """For each situation: seconds, jobs, then missed jobs for each number; in units of `unit`: older is less."""
    unit: float = 1.0
    past: tuple[tuple[float, int], ...] = ()
    """When which situation was, as far back as a start-up takes."""
    plan: tuple[int, ...] = ()
    """How many replicas each situation is to have; 0 where too little is known."""
    strict: tuple[int, ...] = ()
    """The same for a part of the budget: what a situation with more may go down to."""
    calls: int = 0


class Arrivals(Struct, frozen=True):
    """What came in the last `passed_s` seconds: `jobs` with `work_s` seconds of prefill.

    `size_s` is the usual prefill time of one, `slack_s` how long it may wait, `load` what tells situations apart.
    """

    at_s: float
    passed_s: float
    jobs: int
    work_s: float
    size_s: float
    slack_s: float
    load: float


def empty(max_replicas: int) -> Shadows:
    numbers = list(range(1, min(max_replicas, _EXACT) + 1))
    while numbers[-1] < max_replicas:
        numbers.append(min(max_replicas, math.ceil(numbers[-1] * _GROWTH)))
    return Shadows(
        numbers=tuple(numbers),
        backlogs=(0.0,) * len(numbers),
        counts=((0.0,) * (len(numbers) + 2),) * _SITUATIONS,
        plan=(0,) * _SITUATIONS,
        strict=(0,) * _SITUATIONS,
    )


def replicas(shadows: Shadows, load: float) -> tuple[int, int]:
    """How many the present situation is to have, and how many at least before one is given up; 0 if unknown."""
    situation = _situation(load)
    return (shadows.plan[situation], shadows.strict[situation]) if shadows.plan else (0, 0)


def is_known(shadows: Shadows, load: float) -> bool:
    """Whether the present situation, or a higher one, has lasted for a while."""
    seen_s = sum(row[0] for row in shadows.counts[_situation(load) :])
    return seen_s >= _ENOUGH_S * shadows.unit


def _situation(load: float) -> int:
    return 0 if load <= _LOWEST else min(_SITUATIONS - 1, 1 + int(math.log(load / _LOWEST) / math.log(_RATIO)))


def watch(shadows: Shadows, arrivals: Arrivals, start_up_s: float, memory_s: float, budget: float) -> Shadows:
    """The next state; now and then the plan is made anew, so that a share of `budget` misses."""
    past = _past(shadows, arrivals, start_up_s)
    situation = past[0][1]
    unit, counts = shadows.unit * math.exp(arrivals.passed_s / memory_s), shadows.counts
    if unit > _LARGE:
        counts, unit = tuple(tuple(value / unit for value in row) for row in counts), 1.0
    row = list(counts[situation])
    backlogs = _serve(shadows, arrivals, row, unit)
    counts = (*counts[:situation], tuple(row), *counts[situation + 1 :])
    plan, strict = shadows.plan, shadows.strict
    if shadows.calls % _EVERY == 0:
        plan, strict = _plans(shadows.numbers, counts, unit, (budget, budget * _STRICT))
    return Shadows(shadows.numbers, backlogs, counts, unit, past, plan, strict, shadows.calls + 1)


def _past(shadows: Shadows, arrivals: Arrivals, start_up_s: float) -> tuple[tuple[float, int], ...]:
    past = (*shadows.past, (arrivals.at_s, _situation(arrivals.load)))
    first = 0
    while first + 1 < len(past) and past[first + 1][0] <= arrivals.at_s - start_up_s:
        first += 1
    return past[first:]


def _serve(shadows: Shadows, arrivals: Arrivals, row: list[float], unit: float) -> tuple[float, ...]:
    """The backlogs after this; `row` gets the counts. The jobs are thought of as evenly spread and of equal size."""
    passed, work, jobs = arrivals.passed_s, arrivals.work_s, arrivals.jobs
    row[0] += passed * unit
    if not jobs:
        return tuple(max(0.0, left - n * passed) for n, left in zip(shadows.numbers, shadows.backlogs, strict=True))
    row[1] += jobs * unit
    before_last, residual, slack = work - work / jobs, 0.6 * arrivals.size_s, arrivals.slack_s
    backlogs = []
    for index, (n, left) in enumerate(zip(shadows.numbers, shadows.backlogs, strict=True), 2):
        first = (left - (n - 1) * residual) / n
        last = first + before_last / n - passed
        longest, shortest = (first, last) if first > last else (last, first)
        if shortest > slack:
            row[index] += jobs * unit
        elif longest > slack:
            row[index] += jobs * unit * (longest - slack) / (longest - shortest + 1e-9)
        left += work - n * passed
        backlogs.append(left if left > 0 else 0.0)
    return tuple(backlogs)


def _plans(
    numbers: tuple[int, ...], counts: tuple[tuple[float, ...], ...], unit: float, budgets: tuple[float, float]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Buy replicas where each saves most misses, until no more than a budget's share of all jobs misses; for both.

    A situation's replicas cost the time it lasts. What is bought is along the lower hull of misses over replicas, which
    makes the greedy choice the best one.
    """
    usual = [sum(column) for column in zip(*counts, strict=True)]
    if usual[0] < _ENOUGH_S * unit:
        return (0,) * len(counts), (0,) * len(counts)
    borrowed_s = _BORROWED_S * unit
    missed, offers = 0.0, []
    known = [(situation, row) for situation, row in enumerate(counts) if row[0] > 0]
    for situation, own in enumerate(counts):
        row = _shared(own, situation, known, borrowed_s)
        weight = own[0] / row[0]
        missed += row[2] * weight
        hull = _hull(numbers, row)
        for (n, before), (more, after) in itertools.pairwise(hull):
            offers.append(((before - after) / (more - n) / row[0], situation, more, (before - after) * weight))
    offers.sort(reverse=True)
    plan, strict = (_buy(offers, missed, budget * usual[1], len(counts)) for budget in budgets)
    return plan, strict


def _buy(
    offers: list[tuple[float, int, int, float]], missed: float, allowed: float, situations: int
) -> tuple[int, ...]:
    plan = [1] * situations
    for _, situation, more, saved in offers:
        if missed <= allowed:
            break
        missed -= saved
        plan[situation] = more
    return tuple(plan)


def _shared(
    own: tuple[float, ...], situation: int, known: list[tuple[int, tuple[float, ...]]], borrowed_s: float
) -> list[float]:
    """A situation and `borrowed_s` of those near it: what was seen in it alone is a small sample."""
    weights = [_NEAR ** abs(other - situation) for other, _ in known]
    part = borrowed_s / sum(weight * row[0] for weight, (_, row) in zip(weights, known, strict=True))
    shared = list(own)
    for weight, (_, row) in zip(weights, known, strict=True):
        share = part * weight
        for index, value in enumerate(row):
            shared[index] += share * value
    return shared


def _hull(numbers: tuple[int, ...], row: Sequence[float]) -> list[tuple[int, float]]:
    """The lower convex hull of (replicas, missed jobs), down to the first number that misses nothing."""
    hull: list[tuple[int, float]] = []
    for n, missed in zip(numbers, row[2:], strict=True):
        if hull and missed >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (n - hull[-2][0]) >= (missed - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((n, missed))
        if missed <= 0:
            break
    return hull
