"""What a sweep says, as tables for people: fronts, and what a level of attainment costs each policy."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.cluster.simulation.sweep import POLICIES, Row, cost_at, front, mean_of_seeds

LEVELS = (0.95, 0.98, 0.99, 0.995, 0.999)


def by_policy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each policy, means over the seeds, in the order of `POLICIES`."""
    found: dict[str, list[Row]] = {name: [] for name in POLICIES}
    for row in mean_of_seeds(rows):
        found.setdefault(row.policy, []).append(row)
    return {name: rows for name, rows in found.items() if rows}


def costs(rows: Sequence[Row], levels: Sequence[float] = LEVELS) -> list[list[str]]:
    """A header and a line a policy: replica-hours of its cheapest run with at least that attainment."""
    lines = [["policy", *(f"{level:.1%}" for level in levels), "reversals/h"]]
    for name, found in by_policy(rows).items():
        cells = [cost_at(found, level) for level in levels]
        flaps = max(row.reversals_per_hour for row in front(found))
        lines.append([name, *("-" if cell is None else f"{cell:.2f}" for cell in cells), f"{flaps:.1f}"])
    return lines


def runs(rows: Sequence[Row]) -> list[list[str]]:
    """A header and a line a run."""
    head = ["policy", "knob", "start-up s", "seed", "attained", "TTFT", "TPOT", "replica-h", "rev/h", "recovery s"]
    lines = [[*head, "unused"]]
    for row in rows:
        recovery = "-" if row.recovery_s is None else f"{row.recovery_s:.0f}"
        knob = f"{row.knob:g}" if row.floor <= 1 else f"{row.knob:g} min {row.floor}"
        shares = (f"{share:.4f}" for share in (row.attainment, row.attainment_ttft, row.attainment_tpot))
        numbers = (f"{row.replica_hours:.2f}", f"{row.reversals_per_hour:.1f}", recovery, str(row.thrown_away))
        lines.append([row.policy, knob, f"{row.start_up_s:g}", str(row.seed), *shares, *numbers])
    return lines


def behind(rows: Sequence[Row], ours: str = "headrace") -> list[tuple[Row, float | None]]:
    """The points of the rivals' fronts that ours does not reach: each with what its attainment costs us, if we have it.

    Points within 1 % of our replica-hours, and those under 90 %, are left out; so is the oracle.
    """
    found = by_policy(rows)
    own = [row for name, rows in found.items() if name.startswith(ours) for row in rows]
    late: list[tuple[Row, float | None]] = []
    for name, others in found.items():
        if name.startswith(ours) or name == "oracle":
            continue
        for row in front(others):
            cost = cost_at(own, row.attainment - 1e-4)
            if row.attainment >= 0.9 and (cost is None or cost > row.replica_hours * 1.01):
                late.append((row, cost))
    return late


def markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *body = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *body))
