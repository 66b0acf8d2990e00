"""When batches are written: with a pace of an hour, so that nothing here waits for a clock."""

from __future__ import annotations

import time

import pytest

from headrace.broker.rhythm import NOW, Rhythm

PACE_S = 3600.0


async def test_one_batch_may_be_early_and_the_next_one_waits_unless_it_is_urgent() -> None:
    rhythm = Rhythm(PACE_S)
    for _ in range(2):
        rhythm.ask(rhythm.entries_at)
        assert rhythm.wake.is_set()
        rhythm.begin(time.monotonic(), has_entries=True)
        assert not rhythm.wake.is_set()
    rhythm.ask(rhythm.entries_at)
    assert not rhythm.wake.is_set()
    rhythm.ask(NOW)
    assert rhythm.wake.is_set()
    rhythm.begin(time.monotonic(), has_entries=False)


async def test_urgent_batches_in_a_row_make_nothing_wait_for_longer_than_a_pace() -> None:
    rhythm, now = Rhythm(PACE_S), time.monotonic()
    for _ in range(9):
        rhythm.begin(now, has_entries=True)
    assert rhythm.entries_at == pytest.approx(now + PACE_S)


async def test_hints_wait_for_the_next_entries_where_these_follow_closely() -> None:
    rhythm, now = Rhythm(PACE_S), time.monotonic()
    rhythm.begin(now, has_entries=True)
    assert rhythm.hints_at == rhythm.entries_at  # of a step that is alone
    rhythm.begin(now + 1.4 * PACE_S, has_entries=True)
    assert rhythm.hints_at == pytest.approx(now + 2.9 * PACE_S)
    rhythm.begin(now + 2 * PACE_S, has_entries=False)  # an end, say
    assert rhythm.hints_at == pytest.approx(now + 2.9 * PACE_S)
    rhythm.begin(now + 3 * PACE_S, has_entries=True)
    assert rhythm.hints_at == rhythm.entries_at


async def test_what_is_asked_for_earlier_is_written_earlier() -> None:
    rhythm = Rhythm(PACE_S)
    rhythm.ask(time.monotonic() + PACE_S)
    rhythm.ask(time.monotonic() + 2 * PACE_S)
    assert not rhythm.wake.is_set()
    rhythm.ask(time.monotonic() - 1)
    assert rhythm.wake.is_set()
