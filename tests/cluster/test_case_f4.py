"""Case F4: no flapping, on a simulated clock."""

from __future__ import annotations

from msgspec.structs import replace

from headrace.cluster import law
from headrace.cluster.law import Config, Signals
from headrace.cluster.simulation import sweep
from headrace.cluster.simulation.fleet import ReplicaModel, World
from headrace.cluster.simulation.trace import load
from tests.cluster.scenes import Watched, decide_over, even, joined, played, quiet, times_of

SLOTTED = ReplicaModel(prefill_tokens_per_s=1e6, slots=2, step_s=0.02, idle_step_share=1.0, kv_tokens=10**9)
"""A job of 50 tokens takes a second, two at a time: two a second each."""


def config(**fields: object) -> Config:
    plain = Config(
        max_replicas=20,
        prefill_tokens_per_s=1e6,
        decode_tokens_per_s=100.0,
        slots=2,
        start_up_s=20.0,
        hold_s=60.0,
    )
    return replace(plain, **fields)


def test_f4_steady_load_keeps_its_number() -> None:
    policy = Watched(config())
    run = played(even(5, 1800, 10, 50), SLOTTED, World(start_up_s=20.0, max_replicas=20), policy, 1)
    after = [(at, number) for at, number in run.targets if at > 120]
    assert len(after) <= 1800 / 300
    assert all(2 <= number <= 4 for _, number in after)
    assert 2 <= policy.state.target <= 4
    assert max(number for _, number in run.targets) <= 6  # starting ones count: it never runs to the limit


def test_f4_a_square_wave_has_no_down_inside_the_delay() -> None:
    waves = [(60.0 * turn, even(8 if turn % 2 else 4, 30, 10, 50)) for turn in range(30)]
    policy = Watched(config())
    run = played(joined(*waves), SLOTTED, World(start_up_s=20.0, max_replicas=20), policy, 3)
    changes = [at for at, _ in run.targets]
    for down in times_of(run, -1):
        assert all(down - at >= 60 or at >= down for at in changes if at)


def test_f4_no_second_up_for_latency_while_the_first_are_starting() -> None:
    made, state = decide_over(quiet(3, ready=1, running=1), config())
    assert made[-1].target == 1
    late = 0
    targets = []
    for second in range(3, 20):  # one is on its way; what is measured is bad all the time
        late += 5
        seen = Signals(
            at_s=float(second),
            ready=1,
            starting=1,
            running=2,
            firsts=late,
            firsts_met=0,
            decoded_tokens=float(50 * late),
            decode_s=float(50 * late),
        )
        decision = law.desired(seen, replace(state, target=2, slow_s=100.0) if second == 3 else state, config())
        state = decision.state
        targets.append(decision.target)
    assert set(targets) == {2}


def test_f4_no_requests_and_no_latency_change_nothing() -> None:
    made, _ = decide_over(quiet(300, ready=3), config(min_replicas=3, max_replicas=3))
    assert {each.target for each in made} == {3}
    assert all(type(each.target) is int for each in made)


def test_at_most_two_reversals_an_hour_on_a_ramp() -> None:
    trace = load("ramp")
    model, world = ReplicaModel(), World(start_up_s=30.0, max_replicas=24)
    policy = sweep.policy_of("headrace", 0.99, model, world)
    row = sweep.row(sweep.run(trace, model, world, policy, 1), "headrace", 0.99, 1)
    assert row.reversals_per_hour <= 2
    assert row.attainment >= 0.99


def test_f4_a_backlog_that_those_that_start_will_work_off_asks_for_no_more() -> None:
    plain = Config(max_replicas=20, start_up_s=8.0)
    _, state = decide_over(quiet(3, ready=1, starting=1), plain)
    waiting = quiet(4, 3.0, ready=1, starting=1, waiting=40, waiting_tokens=400_000)  # 20 s of prefill
    made, _ = decide_over(waiting, plain, state)
    assert {each.target for each in made} == {2}
    alone = quiet(4, 3.0, ready=1, waiting=40, waiting_tokens=400_000)
    _, state = decide_over(quiet(3, ready=1), plain)
    made, _ = decide_over(alone, plain, state)
    assert made[0].target > 1 and made[0].reason == "backlog"
