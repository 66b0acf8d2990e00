"""What prefix affinity is worth on a trace: hits, waiting and TTFT, for each placement and size of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace as changed
from numpy.typing import NDArray

from headrace.broker.errors import ConfigError
from headrace.cluster.simulation.prefix_cache import UNBOUNDED, best_share
from headrace.cluster.simulation.prefix_fleet import PLACEMENTS
from headrace.cluster.simulation.trace import Trace
from headrace.cluster.simulation.world import ReplicaModel


class Placement(Struct, frozen=True):
    """One run. Times are seconds.

    `hit_share` is of all blocks. `best_share` is that of one cache with the room of all replicas together, and
    `unbounded_share` that of one which forgets nothing.
    """

    trace: str
    placement: str
    replicas: int
    cache_tokens: int
    """Of one replica; 0: unbounded."""
    hit_share: float
    best_share: float
    unbounded_share: float
    wait_p50_s: float
    wait_p90_s: float
    wait_p99_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    attained: float
    """The share of requests whose first token came within the TTFT SLO of `World`."""


def compare(
    trace: Trace, model: ReplicaModel, replicas: Sequence[int], caches: Sequence[int], names: Sequence[str]
) -> Iterator[Placement]:
    """Every placement with every number of replicas and every cache; raises ConfigError for a trace without blocks."""
    if not trace.blocks:
        raise ConfigError(f"--trace {trace.name}: names no blocks of prompts (`hash_ids`), so there is nothing to hit")
    unbounded = best_share(trace, UNBOUNDED)
    for count in replicas:
        for tokens in caches:
            best = best_share(trace, count * tokens) if tokens else unbounded
            for name in names:
                row = _run(trace, _with_cache(model, tokens), count, name)
                yield changed(row, cache_tokens=tokens, best_share=round(best, 4), unbounded_share=round(unbounded, 4))


def _with_cache(model: ReplicaModel, tokens: int) -> ReplicaModel:
    return ReplicaModel(**{**model.__dict__, "cache_tokens": tokens or UNBOUNDED})


def _run(trace: Trace, model: ReplicaModel, replicas: int, name: str) -> Placement:
    fleet = PLACEMENTS[name](trace, model, replicas)
    made = fleet.run()
    hits = fleet.hit_blocks / sum(map(len, trace.blocks))
    waits, ttfts = _quantiles(fleet.waits_s), _quantiles(made.ttft_s)
    attained = round(float(made.is_ttft_met.mean()), 4)
    return Placement(trace.name, name, replicas, 0, round(hits, 4), 0.0, 0.0, *waits, *ttfts, attained)


def _quantiles(seconds: NDArray[np.float64]) -> tuple[float, float, float]:
    p50, p90, p99 = (round(float(np.quantile(seconds, share)), 3) for share in (0.5, 0.9, 0.99))
    return p50, p90, p99


def table(rows: Sequence[Placement]) -> list[list[str]]:
    """A header and a line a run."""
    head = ["replicas", "cache, tokens", "placement", "hit share", "of the best with that cache", "of the best of all"]
    lines = [[*head, "wait p50 / p90 / p99 s", "TTFT p50 / p90 / p99 s", "TTFT SLO met"]]
    for row in rows:
        waits = f"{row.wait_p50_s:.2f} / {row.wait_p90_s:.2f} / {row.wait_p99_s:.2f}"
        ttfts = f"{row.ttft_p50_s:.2f} / {row.ttft_p90_s:.2f} / {row.ttft_p99_s:.2f}"
        shares = [f"{row.hit_share:.1%}", f"{row.hit_share / row.best_share:.1%}"]
        shares.append(f"{row.hit_share / row.unbounded_share:.1%}")
        cache = f"{row.cache_tokens:,}" if row.cache_tokens else "unbounded"
        lines.append([str(row.replicas), cache, row.placement, *shares, waits, ttfts, f"{row.attained:.1%}"])
    return lines
