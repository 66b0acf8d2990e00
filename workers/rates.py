"""What a replica has done since it began, for the registry: whoever decides about replicas takes rates from it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.broker import figures, metrics


def totals(models: Sequence[str], ttft_slo_s: float) -> dict[str, int]:
    """Sums that only grow, from this process's metrics, over a model and its adapters.

    `prompt_tokens` took `prefill_ms` in sum; `firsts` first tokens went out, `firsts_met` of them within `ttft_slo_s`
    (the next bucket of the histogram); `completion_tokens` came at `tpot_us` for a token, as a mean over requests.
    """
    ttft = figures.histogram(metrics.TIME_TO_FIRST_TOKEN, models)
    waited = figures.histogram(metrics.QUEUE_WAIT, models)
    tpot = figures.histogram(metrics.TIME_PER_OUTPUT_TOKEN, models)
    tokens = figures.counts(metrics.TOKENS, "kind", models)
    uppers = figures.bounds(metrics.TIME_TO_FIRST_TOKEN)
    last = next(index for index, upper in enumerate(uppers) if upper >= ttft_slo_s)
    return {
        "prompt_tokens": tokens.get("prompt", 0),
        "completion_tokens": tokens.get("completion", 0),
        "prefill_ms": max(0, round(1000 * (ttft.sum_s - waited.sum_s))),
        "firsts": ttft.count,
        "firsts_met": sum(ttft.counts[: last + 1]),
        "tpot_us": round(1e6 * tpot.sum_s / tpot.count) if tpot.count else 0,
    }
