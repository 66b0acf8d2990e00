"""What a replica asks for follows from what it measures: its batch is full, and few jobs wait in it."""

from __future__ import annotations

import math
import random

import pytest

from headrace.workers.pace import EMPTY_SHARE, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(claim_s: float, gap_s: float, clock: Clock | None = None) -> Pace:
    clock = clock or Clock()
    pace = Pace(clock)
    pace.claimed(claim_s)
    for _ in range(100):
        clock.now += gap_s
        pace.freed()
    return pace


def test_a_replica_that_has_seen_no_slot_come_free_holds_no_job_ahead() -> None:
    pace = Pace(Clock())
    pace.claimed(0.003)
    assert pace.ahead(8) == 0
    for _ in range(8):
        pace.freed()  # all at once: that says nothing
    assert pace.ahead(8) == 0


@pytest.mark.parametrize(
    ("slots", "claim_s", "gap_s", "ahead"),
    [
        (64, 0.003, 5 / 64, 0),  # answers of 200 tokens at 25 ms: a claim costs nothing
        (8, 0.0024, 0.05 / 8, 1),  # answers of 50 ms: a slot would be empty for a twentieth of the time
        (8, 0.1, 0.05 / 8, 8),  # a broker that is far away: no more than one job for each slot
    ],
)
def test_jobs_held_ahead_follow_from_slots_and_times(slots: int, claim_s: float, gap_s: float, ahead: int) -> None:
    assert paced(claim_s, gap_s).ahead(slots) == ahead


@pytest.mark.parametrize("mean", [0.05, 0.3, 1.0, 3.0])
def test_the_batch_is_full_but_for_its_share(mean: float) -> None:
    """The number is the smallest whose expected number of empty slots is small, counted by drawing."""
    slots, random_ = 16, random.Random(1)
    ahead = paced(mean, 1.0).ahead(slots)

    def came_free() -> int:
        count, product = 0, random_.random()
        while product > math.exp(-mean):
            count, product = count + 1, product * random_.random()
        return count

    drawn = [came_free() for _ in range(20_000)]
    empty = [sum(max(0, count - held) for count in drawn) / len(drawn) for held in (ahead, ahead - 1)]
    assert empty[0] <= 1.1 * EMPTY_SHARE * slots
    assert ahead == 0 or empty[1] > 0.9 * EMPTY_SHARE * slots


def test_a_slot_that_does_not_come_free_any_more_ends_holding_ahead() -> None:
    clock = Clock()
    pace = paced(0.0024, 0.05 / 8, clock)
    assert pace.ahead(8) == 1
    clock.now += 10
    assert pace.ahead(8) == 0


def test_prompts_are_enough_for_the_steps_until_the_next_claim() -> None:
    pace = Pace(Clock())
    assert pace.enough_tokens(0) is None
    assert pace.enough_tokens(512) == 1024  # nothing was measured: this step and the next
    pace.stepped(0.025)
    pace.claimed(0.06)
    assert pace.enough_tokens(512) == 4 * 512
    pace.owes("a", 2000)
    assert pace.enough_tokens(512) == 48
    pace.owes("b", 2000)
    assert pace.enough_tokens(512) == 0
    pace.prefilled("a", 2000)
    pace.prefilled("b")
    assert pace.enough_tokens(512) == 4 * 512


def test_the_rate_of_prefill_is_of_the_time_in_which_there_was_one() -> None:
    clock = Clock()
    pace = Pace(clock)
    assert pace.bytes_per_s == 0
    for job_id in "abcdef":
        clock.now += 100  # idle
        pace.prefills(job_id)
        clock.now += 1.0
        pace.prefilled(job_id, 3000)
    assert pace.bytes_per_s == 10_000
