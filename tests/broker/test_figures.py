"""What a process says of itself: sums that add up over processes, and quantiles as Prometheus has them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker import figures, metrics
from headrace.broker.figures import FIELD, WINDOW_S, Figures, Histogram, Published, Recorder

UPPERS = figures.bounds(metrics.TIME_TO_FIRST_TOKEN)
COUNTS = st.lists(st.integers(0, 1000), min_size=len(UPPERS), max_size=len(UPPERS))


def test_buckets_end_without_a_bound() -> None:
    assert UPPERS[-1] == math.inf
    assert UPPERS[:-1] == sorted(UPPERS[:-1])


def test_a_quantile_lies_where_prometheus_puts_it() -> None:
    """Of 10 in (0.1, 0.25] and 10 in (0.25, 0.5] the median is where the first bucket ends."""
    counts = [0] * len(UPPERS)
    counts[UPPERS.index(0.25)] = counts[UPPERS.index(0.5)] = 10
    seen = Histogram(counts, 5.0)
    assert figures.quantile_s(seen, UPPERS, 0.5) == pytest.approx(0.25)
    assert figures.quantile_s(seen, UPPERS, 0.75) == pytest.approx(0.375)
    assert figures.share_within(seen, UPPERS, 0.25) == 0.5
    assert figures.share_within(seen, UPPERS, 0.5) == 1.0
    assert figures.share_within(seen, UPPERS, 0.3) == pytest.approx(0.6)


def test_what_is_above_all_bounds_is_said_to_be_the_last_bound() -> None:
    counts = [0] * len(UPPERS)
    counts[-1] = 3
    assert figures.quantile_s(Histogram(counts), UPPERS, 0.5) == UPPERS[-2]
    assert figures.share_within(Histogram(counts), UPPERS, UPPERS[-2]) == 0.0


def test_nothing_has_no_quantile() -> None:
    assert figures.quantile_s(Histogram(), UPPERS, 0.5) is None
    assert figures.share_within(Histogram([0] * len(UPPERS)), UPPERS, 1.0) is None


@given(COUNTS, st.floats(0.01, 0.999))
def test_a_quantile_and_the_share_within_it_agree(counts: list[int], share: float) -> None:
    seen = Histogram(counts)
    found = figures.quantile_s(seen, UPPERS, share)
    if not seen.count:
        assert found is None
    elif counts[-1] / seen.count < 1 - share:
        assert found is not None
        assert figures.share_within(seen, UPPERS, found) == pytest.approx(share, abs=1e-6)


@given(COUNTS, COUNTS, st.dictionaries(st.sampled_from("abc"), st.integers(1, 9)))
def test_figures_add_up_and_back(one: list[int], other: list[int], words: dict[str, int]) -> None:
    a, b = Figures(ttft=Histogram(one), failovers=words), Figures(ttft=Histogram(other), tokens={"prompt": 3})
    both = a + b
    assert both.ttft.count == sum(one) + sum(other)
    assert ((both - b).failovers, both.tokens) == (words, {"prompt": 3})
    assert (both - a).ttft.counts == other


def test_recent_is_what_came_in_the_window_and_no_more() -> None:
    recorder, said = Recorder(), Published()
    for second in range(1000):
        total = Figures(requests={"ok": second}, tokens={"completion": 10 * second})
        about = recorder.publish(float(second), total)
        said = figures.published(about)
        assert said.total.requests.get("ok", 0) == second
    late = said.recent.requests["ok"]
    assert WINDOW_S <= late <= WINDOW_S + 10
    assert said.tokens_per_s == pytest.approx(10)


def test_a_young_process_says_all_that_it_has_done() -> None:
    recorder = Recorder()
    recorder.publish(0.0, Figures())
    said = figures.published(recorder.publish(3.0, Figures(tokens={"completion": 7})))
    assert said.recent.tokens == {"completion": 7}
    assert said.tokens_per_s == pytest.approx(7 / 3, abs=0.1)


@pytest.mark.parametrize("about", [{}, {FIELD: "no JSON"}, {FIELD: '{"total": 3}'}])
def test_a_presence_of_another_build_says_nothing(about: dict[str, str]) -> None:
    assert figures.published(about) == Published()


def test_a_replica_s_figures_are_its_metrics_whatever_labels_they_have() -> None:
    before = figures.of_replica("figures-test")
    histogram = metrics.TIME_TO_FIRST_TOKEN
    labels = {name: "figures-test" if name == "model" else "x" for name in histogram._labelnames}
    histogram.labels(**labels).observe(0.3)
    histogram.labels(**labels).observe(1000.0)
    seen = figures.of_replica("figures-test") - before
    assert seen.ttft.counts[UPPERS.index(0.5)] == seen.ttft.counts[-1] == 1
    assert seen.ttft.count == 2
    assert seen.ttft.sum_s == pytest.approx(1000.3)
