"""What a replica has done since it began, for the registry: whoever decides about replicas takes rates from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.broker import metrics


def totals(models: Sequence[str], ttft_slo_s: float) -> dict[str, int]:
    """Sums that only grow, from this process's metrics, over a model and its adapters.

    `prompt_tokens` took `prefill_ms` in sum; `firsts` first tokens went out, `firsts_met` of them within `ttft_slo_s`
    (the next bucket of the histogram); `completion_tokens` came at `tpot_us` for a token, as a mean over requests.
    """
    ttft = _samples(metrics.TIME_TO_FIRST_TOKEN, models)
    waited, tpot = _samples(metrics.QUEUE_WAIT, models), _samples(metrics.TIME_PER_OUTPUT_TOKEN, models)
    tokens = _samples(metrics.TOKENS, models)
    bounds = sorted((float(key[1]), value) for key, value in ttft.items() if key[0] == "bucket")
    met = next((value for bound, value in bounds if bound >= ttft_slo_s), 0.0)
    count = tpot.get(("count", ""), 0.0)
    return {
        "prompt_tokens": int(tokens.get(("total", "prompt"), 0)),
        "completion_tokens": int(tokens.get(("total", "completion"), 0)),
        "prefill_ms": max(0, round(1000 * (ttft.get(("sum", ""), 0.0) - waited.get(("sum", ""), 0.0)))),
        "firsts": int(ttft.get(("count", ""), 0)),
        "firsts_met": int(met),
        "tpot_us": round(1e6 * tpot.get(("sum", ""), 0.0) / count) if count else 0,
    }


def _samples(metric: metrics.Metric, models: Sequence[str]) -> dict[tuple[str, str], float]:
    """The sums of these models' samples of a metric, by the last word of their name, and their bucket or kind."""
    found: dict[tuple[str, str], float] = {}
    for family in metric.collect():
        for sample in family.samples:
            if sample.labels.get("model") in models and math.isfinite(sample.value):
                detail = sample.labels.get("le") or sample.labels.get("kind") or ""
                place = sample.name.rpartition("_")[2], detail
                found[place] = found.get(place, 0.0) + sample.value
    return found
