"""What `headrace bench` says in the end: what clients saw, and what each process of this host spent on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from headrace.cli.load_plan import Totals
from headrace.cli.processes import Process, Usage

_QUANTILES = (50, 95, 99)
_MIB = 1 << 20


class Cost(Struct):
    """User and system time of a process over the run; `role` is `client` for the load generator itself."""

    role: str
    pid: int
    cpu_s: float
    cpu_us_per_token: float
    rss_mib: float | None = None


class Report(Struct):
    """The fields of `--json`."""

    requests: int
    done: int
    """Requests whose answer was whole and right."""
    resumes: int
    errors: dict[str, int]
    mismatches: int
    elapsed_s: float
    tokens: int
    tokens_per_s: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    client: Cost
    processes: list[Cost]

    @property
    def is_clean(self) -> bool:
        return not self.errors and not self.mismatches and self.done == self.requests


def report(totals: Totals, costs: list[Cost], pid: int) -> Report:
    """Put a run's totals in the units of people."""
    return Report(
        requests=totals.begun,
        done=totals.done,
        resumes=totals.resumes,
        errors=dict(totals.errors),
        mismatches=totals.mismatches,
        elapsed_s=round(totals.elapsed_s, 3),
        tokens=totals.tokens,
        tokens_per_s=round(totals.tokens / max(totals.elapsed_s, 1e-9), 1),
        ttft_ms=quantiles_ms(totals.ttft),
        itl_ms=quantiles_ms(totals.itl),
        client=_cost("client", pid, totals.client_cpu_s, totals.tokens),
        processes=costs,
    )


def costs(found: Sequence[Process], before: Mapping[int, Usage], now: Mapping[int, Usage], tokens: int) -> list[Cost]:
    """What each process spent between two looks; one that ended meanwhile is left out."""
    rows = []
    for process in sorted(found, key=lambda process: (process["role"], process["pid"])):
        if (used := now.get(process["pid"])) is not None:
            spent_s = used.cpu_s - before.get(process["pid"], Usage(0.0, 0)).cpu_s
            rows.append(_cost(process["role"], process["pid"], spent_s, tokens, round(used.rss_bytes / _MIB, 1)))
    return rows


def quantiles_ms(samples_s: Sequence[float]) -> dict[str, float]:
    """The p50, p95 and p99 of times in seconds, in milliseconds; 0 of none."""
    ordered = sorted(samples_s) or [0.0]
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1000, 2) for q in _QUANTILES}


def show(told: Report, console: Console) -> None:
    """The report as tables."""
    for name in ("requests", "done", "resumes", "mismatches", "tokens", "tokens_per_s", "elapsed_s"):
        console.print(f"{name:<13} {getattr(told, name)}", highlight=False)
    errors = ", ".join(f"{code} {count}" for code, count in told.errors.items())
    console.print(f"{'errors':<13} {errors or 0}", highlight=False)
    latency = Table("ms", *(f"p{q}" for q in _QUANTILES))
    for name, row in (("TTFT", told.ttft_ms), ("ITL", told.itl_ms)):
        latency.add_row(name, *(f"{value:.2f}" for value in row.values()))
    spent = Table("process", "pid", "CPU µs/token", "CPU s", "RSS MiB")
    for each in told.processes:
        _add_cost(spent, each)
    spent.add_section()
    _add_cost(spent, told.client)
    console.print(latency, spent)


def _cost(role: str, pid: int, cpu_s: float, tokens: int, rss_mib: float | None = None) -> Cost:
    return Cost(role, pid, round(cpu_s, 2), round(cpu_s * 1e6 / max(1, tokens), 2), rss_mib)


def _add_cost(table: Table, cost: Cost) -> None:
    rss = "" if cost.rss_mib is None else str(cost.rss_mib)
    table.add_row(cost.role, str(cost.pid), f"{cost.cpu_us_per_token:.2f}", f"{cost.cpu_s:.2f}", rss)
