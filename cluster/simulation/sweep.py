"""Runs of policies over knobs, and what is said of each: one `Row`, one line of JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace as changed

from headrace.broker.errors import ConfigError
from headrace.cluster import law
from headrace.cluster.simulation import oracle
from headrace.cluster.simulation.fleet import Fleet, Policy, ReplicaModel, Run, World
from headrace.cluster.simulation.rivals import RIVALS
from headrace.cluster.simulation.trace import Trace

ATTAINMENTS = (0.6, 0.8, 0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.993, 0.996, 0.998, 0.9995)
"""Our knob: the share of requests that is to meet its SLO."""
FLOORS = tuple(float(n) for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16))
"""The knob of `headrace_min`: our law at `_LEAN`, with so many replicas as its minimum."""
POLICIES = ("headrace", "headrace_min", *RIVALS, "oracle")
_LEAN = 0.6

_BIN_S = 10.0
_STEP_RATIO = 1.5
_GOOD = 0.95
_GOOD_FOR = 6
_ORACLE_FLATS = (0.3, 0.995)


class Row(Struct, frozen=True):
    """One run. `knob` is the policy's main setting; `floor` the fewest replicas it may go down to."""

    policy: str
    knob: float
    trace: str
    start_up_s: float
    seed: int
    attainment: float
    """Share of all requests that met both SLOs."""
    replica_hours: float
    reversals_per_hour: float
    recovery_s: float | None
    """From the trace's largest step until the SLO is met again for a minute, less the start-up time; null: no step."""
    attainment_ttft: float = 0.0
    attainment_tpot: float = 0.0
    thrown_away: int = 0
    """Replicas that were started and have served nothing."""
    replicas_max: int = 0
    requests: int = 0
    floor: int = 1


class Headrace:
    """Our law, driven as the Ray Serve policy drives it: one reading a second."""

    period_s = 1.0
    wants_p90 = False

    def __init__(self, config: law.Config) -> None:
        self.config = config
        self.state = law.State()
        self.reasons: list[tuple[float, int, str]] = []

    def decide(self, signals: law.Signals) -> int:
        decision = law.desired(signals, self.state, self.config)
        if decision.target != self.state.target:
            self.reasons.append((signals.at_s, decision.target, decision.reason))
        self.state = decision.state
        return decision.target


class _Floored:
    """Any policy, with a number it may not go below."""

    def __init__(self, policy: Policy, floor: int) -> None:
        self._policy, self._floor = policy, floor
        self.period_s, self.wants_p90 = policy.period_s, policy.wants_p90

    def decide(self, signals: law.Signals) -> int:
        return max(self._floor, self._policy.decide(signals))


def config_of(model: ReplicaModel, world: World, attainment: float, floor: int = 1) -> law.Config:
    """What our law is told of the simulated replicas."""
    return law.Config(
        min_replicas=floor,
        max_replicas=world.max_replicas,
        attainment=attainment,
        ttft_slo_s=world.ttft_slo_s,
        ttft_slo_prefills=world.ttft_slo_prefills,
        tpot_slo_s=world.tpot_slo_s,
        prefill_tokens_per_s=model.prefill_tokens_per_s,
        decode_tokens_per_s=model.slots / model.step_s,
        slots=model.slots,
        kv_tokens=model.kv_tokens,
        start_up_s=world.start_up_s,
    )


def policy_of(name: str, knob: float, model: ReplicaModel, world: World, floor: int = 1) -> Policy:
    """A fresh policy; raises ConfigError for a name that is none."""
    if name == "headrace_min":
        return Headrace(config_of(model, world, _LEAN, int(knob)))
    if name == "headrace":
        return Headrace(config_of(model, world, knob, floor))
    if name not in RIVALS:
        raise ConfigError(f"--policy {name!r}: is not one of {', '.join(POLICIES)}, all")
    made = cast(Policy, RIVALS[name][0](knob))
    return made if floor <= 1 else _Floored(made, floor)


def knobs_of(name: str) -> Sequence[float]:
    return {"headrace": ATTAINMENTS, "headrace_min": FLOORS}.get(name) or RIVALS[name][1]


def usual_start(trace: Trace, model: ReplicaModel) -> int:
    """With how many every policy but the static one begins: what the first five minutes need, at a use of 0.7."""
    first = trace.arrival_s < 300
    load = float(trace.input_tokens[first].sum()) / min(300.0, trace.span_s) / model.prefill_tokens_per_s
    return max(1, math.ceil(load / 0.7))


def run(trace: Trace, model: ReplicaModel, world: World, policy: Policy, initial: int) -> Run:
    return Fleet(trace, model, world, policy, initial).run()


def sweep(
    trace: Trace, model: ReplicaModel, world: World, names: Sequence[str], seeds: int = 1, floors: Sequence[int] = (1,)
) -> Iterator[Row]:
    """Every knob of every policy named, with so many seeds."""
    for seed in range(seeds):
        seeded = World(**{**world.__dict__, "seed": seed})
        for name in names:
            if name == "oracle":
                yield from _oracle(trace, model, seeded)
                continue
            is_fixed = name in ("static", "headrace_min")
            for floor in (1,) if is_fixed else floors:
                for knob in knobs_of(name):
                    least = int(knob) if is_fixed else floor
                    start = least if name == "static" else max(least, usual_start(trace, model))
                    if start > world.max_replicas:
                        continue
                    made = run(trace, model, seeded, policy_of(name, knob, model, seeded, floor), start)
                    yield row(made, name, knob, floor)
                    if is_fixed and made.is_met.all():
                        break  # more replicas only cost more


def _oracle(trace: Trace, model: ReplicaModel, world: World) -> Iterator[Row]:
    """Its knob is the round of the search, from several flat plans."""
    for flat in range(1, world.max_replicas):
        runs = oracle.search(trace, model, world, flat)
        first = next(runs)
        share = float(first.is_met.mean())
        if flat > 1 and share < _ORACLE_FLATS[0]:
            continue
        for number, made in enumerate((first, *runs)):
            yield row(made, "oracle", flat + number / 100, 1)
        if share > _ORACLE_FLATS[1]:
            return


def row(made: Run, name: str, knob: float, floor: int) -> Row:
    hours = made.trace.span_s / 3600
    return Row(
        policy=name,
        knob=knob,
        trace=made.trace.name,
        start_up_s=made.world.start_up_s,
        seed=made.world.seed,
        attainment=round(float(made.is_met.mean()), 6),
        replica_hours=round(made.replica_hours, 4),
        reversals_per_hour=round(reversals(made) / hours, 3),
        recovery_s=recovery_s(made),
        attainment_ttft=round(float(made.is_ttft_met.mean()), 6),
        attainment_tpot=round(float(made.is_tpot_met.mean()), 6),
        thrown_away=made.thrown_away,
        replicas_max=max(number for _, number in made.targets),
        requests=len(made.trace),
        floor=floor,
    )


def reversals(made: Run) -> int:
    """How often the wanted number went down after up, or up after down."""
    moves = np.sign(np.diff([number for _, number in made.targets]))
    return int((moves[1:] * moves[:-1] < 0).sum())


def recovery_s(made: Run) -> float | None:
    """See `Row.recovery_s`; bins of ten seconds of which 95 % met both SLOs are good."""
    step = largest_step_s(made.trace, ReplicaModel())
    if step is None:
        return None
    bins = int(made.trace.span_s / _BIN_S) + 1
    index = (made.trace.arrival_s / _BIN_S).astype(int)
    total = np.bincount(index, minlength=bins)
    met = np.bincount(index, weights=made.is_met, minlength=bins)
    good = met >= _GOOD * total
    first = int(step / _BIN_S)
    for begin in range(first, bins):
        if good[begin : begin + _GOOD_FOR].all():
            return round(max(0.0, begin * _BIN_S - step - made.world.start_up_s), 1)
    return round(made.trace.span_s - step, 1)


def largest_step_s(trace: Trace, model: ReplicaModel) -> float | None:
    """When two minutes have most more load than the five before them; None if never half as much again."""
    bins = int(trace.span_s / _BIN_S) + 1
    load = np.bincount((trace.arrival_s / _BIN_S).astype(int), weights=trace.input_tokens, minlength=bins)
    sums = np.concatenate([[0.0], np.cumsum(load)])
    before, after = 30, 12
    if bins < before + after + 1:
        return None
    at = np.arange(before, bins - after)
    past, next_ = (sums[at] - sums[at - before]) / before, (sums[at + after] - sums[at]) / after
    rise = next_ - past
    rise[next_ < _STEP_RATIO * past] = 0
    best = int(rise.argmax())
    return float(at[best] * _BIN_S) if rise[best] > 0 else None


def front(rows: Sequence[Row]) -> list[Row]:
    """Those that no other one beats: in order of replica-hours, each with more attainment than all cheaper ones."""
    best: list[Row] = []
    for each in sorted(rows, key=lambda one: (one.replica_hours, -one.attainment)):
        if not best or each.attainment > best[-1].attainment:
            best.append(each)
    return best


def cost_at(rows: Sequence[Row], attainment: float) -> float | None:
    """The fewest replica-hours with at least this attainment; None if none has it."""
    hours = [each.replica_hours for each in rows if each.attainment >= attainment]
    return min(hours) if hours else None


def mean_of_seeds(rows: Sequence[Row]) -> list[Row]:
    """One row for each policy, knob and floor, with the means over the seeds."""
    groups: dict[tuple[str, float, int], list[Row]] = {}
    for each in rows:
        groups.setdefault((each.policy, each.knob, each.floor), []).append(each)
    return [
        changed(
            group[0],
            attainment=float(np.mean([each.attainment for each in group])),
            replica_hours=float(np.mean([each.replica_hours for each in group])),
            reversals_per_hour=float(np.mean([each.reversals_per_hour for each in group])),
        )
        for group in groups.values()
    ]
