"""From the registry's counts to rates that only grow."""

from __future__ import annotations

import pytest

from headrace.broker import metrics
from headrace.broker.protocol import ModelStats
from headrace.cluster.signals import Totals, signals_of
from headrace.workers.rates import totals

STATS = ModelStats({"default": 3, "batch": 2}, 1500, 4, 900, 50, 7000)


def replica(state: str = "ready", **counts: int) -> dict[str, str]:
    return {"model": "m", "state": state, **{name: str(count) for name, count in counts.items()}}


def test_a_reading_is_what_the_broker_and_the_registry_say() -> None:
    there = {"a": replica(), "b": replica("starting"), "c": replica("draining"), "d": {"model": "x", "state": "ready"}}
    seen = signals_of("m", 9.0, STATS, there, Totals())
    assert (seen.waiting, seen.waiting_tokens, seen.oldest_s, seen.running) == (5, 900, 1.5, 4)
    assert (seen.ready, seen.starting, seen.arrived_jobs, seen.arrived_tokens) == (1, 1, 50, 7000)


def test_a_replica_that_leaves_takes_nothing_back() -> None:
    sums = Totals()
    signals_of("m", 1.0, STATS, {"a": replica(prompt_tokens=100, prefill_ms=50, firsts=4, firsts_met=3)}, sums)
    signals_of("m", 2.0, STATS, {"b": replica(prompt_tokens=10)}, sums)
    seen = signals_of("m", 3.0, STATS, {"b": replica(prompt_tokens=30, completion_tokens=8, tpot_us=25_000)}, sums)
    assert (seen.prefilled_tokens, seen.prefill_s, seen.firsts, seen.firsts_met) == (130, 0.05, 4, 3)
    assert seen.decoded_tokens == 8
    assert seen.decode_s == pytest.approx(0.2)


def test_counts_that_are_missing_or_nonsense_are_zero() -> None:
    seen = signals_of("m", 1.0, STATS, {"a": replica(), "b": {"model": "m", "firsts": "-3", "tpot_us": "?"}}, Totals())
    assert (seen.firsts, seen.decode_s) == (0, 0)


def test_a_replicas_totals_are_its_own_metrics() -> None:
    name = "a model of this test"
    metrics.QUEUE_WAIT.labels(name).observe(0.1)
    for seconds in (0.2, 0.4, 2.0):
        metrics.TIME_TO_FIRST_TOKEN.labels(name, "true" if seconds < 1 else "false").observe(seconds)
    metrics.TIME_PER_OUTPUT_TOKEN.labels(name).observe(0.04)
    metrics.TOKENS.labels(name, "prompt").inc(700)
    metrics.TOKENS.labels(name, "completion").inc(30)
    assert totals([name], 0.5) == {
        "prompt_tokens": 700,
        "completion_tokens": 30,
        "prefill_ms": 2500,
        "firsts": 3,
        "firsts_met": 2,
        "tpot_us": 40_000,
    }
    assert set(totals(["unknown"], 0.5).values()) == {0}
