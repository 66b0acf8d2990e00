"""Capacity planning: how many replicas a trace needs at a service level, and what that costs."""

from __future__ import annotations

from msgspec import Struct

from headrace.cluster.simulation import sweep
from headrace.cluster.simulation.fleet import ReplicaModel, World
from headrace.cluster.simulation.rivals import Static
from headrace.cluster.simulation.sweep import Headrace
from headrace.cluster.simulation.trace import Trace


class Plan(Struct, frozen=True):
    """`static` replicas all the time are the fewest that attain it, None if none do; `auto` is with our law."""

    trace: str
    attainment: float
    static: int | None
    static_attainment: float
    static_replica_hours: float
    auto_attainment: float
    auto_replica_hours: float
    auto_min: int
    auto_max: int
    span_hours: float
    static_cost: float
    auto_cost: float


def plan(trace: Trace, model: ReplicaModel, world: World, attainment: float, price: float) -> Plan:
    """`price` is for one replica and hour, in any currency."""
    found, share, hours = None, 0.0, 0.0
    low, high = 1, world.max_replicas
    while low <= high:  # more replicas never attain less, but for chance
        middle = (low + high) // 2
        made = sweep.run(trace, model, world, Static(middle), middle)
        attained = float(made.is_met.mean())
        if attained >= attainment:
            found, share, hours, high = middle, attained, made.replica_hours, middle - 1
        else:
            share, hours = (share, hours) if found else (attained, made.replica_hours)
            low = middle + 1
    policy = Headrace(sweep.config_of(model, world, attainment))
    auto = sweep.run(trace, model, world, policy, sweep.usual_start(trace, model))
    numbers = [number for _, number in auto.targets]
    return Plan(
        trace.name,
        attainment,
        found,
        share,
        hours,
        float(auto.is_met.mean()),
        auto.replica_hours,
        min(numbers),
        max(numbers),
        trace.span_s / 3600,
        hours * price,
        auto.replica_hours * price,
    )


def sentences(found: Plan, price: float) -> list[str]:
    """What a plan says, for people."""
    said = f"{found.trace}: {found.span_hours:.2f} h, {found.attainment:.2%} of requests within both SLOs"
    if found.static is None:
        first = f"  no fixed number of replicas attains that; the most tried attains {found.static_attainment:.2%}"
    else:
        first = (
            f"  fixed: {found.static} replicas attain {found.static_attainment:.2%}"
            f" for {found.static_replica_hours:.2f} replica-hours"
        )
    second = (
        f"  autoscaled: {found.auto_min} to {found.auto_max} replicas attain {found.auto_attainment:.2%}"
        f" for {found.auto_replica_hours:.2f} replica-hours"
    )
    if price:
        first += f", {found.static_cost:.2f} in money" if found.static else ""
        second += f", {found.auto_cost:.2f} in money"
    return [said, first, second]
