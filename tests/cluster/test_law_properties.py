"""What holds of the law whatever it is told: hypothesis looks for numbers that break it."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.cluster import law
from headrace.cluster.budget import Want, split
from headrace.cluster.law import Config, Signals, State

COUNTS = st.integers(0, 10**12)
NUMBERS = st.floats(0, 1e15)
ODD = st.sampled_from([math.nan, math.inf, -math.inf, -1.0])

SIGNALS = st.builds(
    Signals,
    at_s=st.floats(0, 1e9),
    age_s=st.floats(0, 9),
    waiting=COUNTS,
    waiting_tokens=COUNTS,
    oldest_s=NUMBERS,
    running=COUNTS,
    ready=st.integers(0, 10**4),
    starting=st.integers(0, 10**4),
    arrived_jobs=COUNTS,
    arrived_tokens=COUNTS,
    prefilled_tokens=NUMBERS,
    prefill_s=NUMBERS,
    firsts=COUNTS,
    firsts_met=COUNTS,
    decoded_tokens=NUMBERS,
    decode_s=NUMBERS,
    kv_tokens=COUNTS,
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    least = draw(st.integers(0, 5))
    return Config(
        min_replicas=least,
        max_replicas=draw(st.integers(max(1, least), 80)),
        attainment=draw(st.floats(0.5, 0.9999)),
        ttft_slo_s=draw(st.floats(0.01, 100)),
        ttft_slo_prefills=draw(st.floats(0, 5)),
        prefill_tokens_per_s=draw(st.floats(0.1, 1e6)),
        decode_tokens_per_s=draw(st.floats(0.1, 1e6)),
        slots=draw(st.integers(1, 4096)),
        kv_tokens=draw(st.integers(0, 10**7)),
        start_up_s=draw(st.floats(0, 600)),
        hold_s=draw(st.floats(0, 600)),
    )


@settings(max_examples=150, deadline=None)
@given(configs(), st.lists(st.tuples(SIGNALS, st.floats(0.05, 12)), min_size=1, max_size=25))
def test_the_target_is_a_number_within_the_bounds_whatever_is_seen(
    config: Config, steps: list[tuple[Signals, float]]
) -> None:
    state, now = State(), 0.0
    for signals, passed in steps:
        now += passed
        decision = law.desired(replace(signals, at_s=now), state, config)
        state = decision.state
        assert type(decision.target) is int
        assert config.min_replicas <= decision.target <= config.max_replicas
        floats = [
            getattr(state, name) for name in ("tokens_per_s", "quick", "calm", "level", "trend", "busy", "missed")
        ]
        assert all(math.isfinite(value) for value in floats)


FIELDS = [name for name in Signals.__struct_fields__ if name != "at_s"]


@settings(max_examples=100, deadline=None)
@given(configs(), SIGNALS, st.sampled_from(FIELDS), ODD)
def test_signals_that_are_no_numbers_change_nothing(config: Config, signals: Signals, field: str, odd: float) -> None:
    known = law.desired(replace(signals, at_s=1.0), State(), config)
    broken: Any = replace(signals, at_s=2.0, **{field: odd})
    after = law.desired(broken, known.state, config)
    assert (after.target, after.reason, after.state) == (known.target, "stale", known.state)


@settings(max_examples=100, deadline=None)
@given(configs(), SIGNALS, st.floats(10.001, 1e6))
def test_old_signals_and_none_hold_the_number(config: Config, signals: Signals, age_s: float) -> None:
    known = law.desired(replace(signals, at_s=1.0), State(), config)
    for later in (replace(signals, at_s=2.0, age_s=age_s), None):
        after = law.desired(later, known.state, config)
        assert (after.target, after.reason) == (known.target, "stale")


WANTS = st.lists(
    st.builds(
        Want,
        model=st.sampled_from("abcdef"),
        wanted=st.integers(0, 20),
        least=st.integers(0, 5),
        gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0, 8.0]),
        priority=st.integers(-2, 2),
    ),
    max_size=6,
    unique_by=lambda want: want.model,
)


@settings(max_examples=200, deadline=None)
@given(WANTS, st.one_of(st.none(), st.floats(0, 64)), st.randoms())
def test_a_split_stays_within_the_budget_and_the_wants_in_any_order(
    wants: list[Want], gpus: float | None, random: Any
) -> None:
    given_ = split(wants, gpus)
    assert all(0 <= given_[want.model] <= want.wanted for want in wants)
    if gpus is not None:
        assert sum(given_[want.model] * want.gpus for want in wants) <= gpus + 1e-9
    random.shuffle(wants)
    assert split(wants, gpus) == given_
