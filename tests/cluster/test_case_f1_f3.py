"""Cases F1 to F3: what the depth signal is, the first request from zero, and that it all goes down again."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.memory import MemoryBroker
from headrace.broker.models import ModelAutoscaling, ScriptedModel
from headrace.broker.protocol import Broker
from headrace.broker.settings import AutoscalerSettings, QueueSettings, Settings
from headrace.cluster import law
from headrace.cluster.autoscaler import Autoscaler
from headrace.cluster.law import Config, Signals, State
from headrace.cluster.signals import Totals, signals_of
from headrace.cluster.simulation.fleet import ReplicaModel, World
from tests.broker.steps import admit, claim
from tests.cluster.scenes import Watched, decide_over, even, joined, played, quiet, times_of
from tests.faults import FaultyBroker
from tests.support import eventually


async def read(broker: Broker, totals: Totals) -> Signals:
    return signals_of("m", 1.0, await broker.stats("m"), await broker.listing("replicas"), totals)


async def test_f1_the_signal_is_what_waits_and_what_runs_is_another() -> None:
    broker = MemoryBroker(QueueSettings())
    totals = Totals()
    await broker.present("cluster", "c", "m", {})
    jobs = [await admit(broker, prompt_tokens=10) for _ in range(100)]
    seen = await read(broker, totals)
    assert (seen.waiting, seen.running, seen.waiting_tokens, seen.arrived_jobs) == (100, 0, 1000, 100)
    for replica in ("r1", "r2"):
        await broker.present("replicas", replica, "m", {"model": "m", "state": "ready", "slots": 4})
        await claim(broker, replica)
    seen = await read(broker, totals)
    assert (seen.waiting, seen.running, seen.waiting_tokens, seen.ready) == (98, 2, 980, 2)
    for job in jobs:
        await broker.cancel(job, "client")
    seen = await read(broker, totals)
    assert (seen.waiting, seen.waiting_tokens, seen.oldest_s) == (0, 0, 0)
    assert (seen.arrived_jobs, seen.arrived_tokens) == (100, 1000)


def settings_of(**autoscaling: object) -> Settings:
    chosen = ModelAutoscaling(max_replicas=8, start_up_s=1.0, **autoscaling)  # type: ignore[arg-type]
    return Settings(
        [ScriptedModel(name="m", slots=4, replicas=2, autoscaling=chosen)],
        autoscaler=AutoscalerSettings(period_s=0.1, stale_s=0.5),
    )


@pytest.mark.parametrize("waiting", [0, 500])
async def test_f1_a_broker_that_is_away_holds_the_number(waiting: int) -> None:
    plain = MemoryBroker(QueueSettings())
    faults = FaultyBroker(plain)
    await plain.present("cluster", "c", "m", {})
    scaler = Autoscaler(settings_of(min_replicas=0, idle_s=0.0), "m", lambda: faults.broker)
    faults.down |= {"stats", "listing", "present"}
    scaler.start()
    try:
        for _ in range(waiting):
            await admit(plain, prompt_tokens=1000)
        numbers = [scaler.decide(3, now_s=float(second)) for second in range(1, 60)]
        assert set(numbers) == {3}
    finally:
        scaler.stop()
        await eventually(lambda: not scaler._thread.is_alive())


async def test_the_autoscaler_lives_in_the_brokers_capacity_and_its_decisions_are_there_to_read() -> None:
    broker = MemoryBroker(QueueSettings())
    scaler = Autoscaler(settings_of(min_replicas=0), "m", lambda: broker)
    scaler.start()
    try:
        await eventually(lambda: scaler._reading is not None)
        await admit(broker)  # the autoscaler says that capacity is wanted, though no replica is there
        await eventually(lambda: scaler._reading is not None and scaler._reading.models["m"].waiting == 1)
        assert scaler.decide(0) == 1

        async def newest() -> str:
            kept = await broker.decisions("m", 1)
            return kept[0].reason if kept else ""

        await eventually(lambda: asyncio.ensure_future(newest()))
        assert await newest() == "wake"
    finally:
        scaler.stop()
        await eventually(lambda: not scaler._thread.is_alive())


async def test_an_advisory_autoscaler_answers_what_there_is() -> None:
    settings = settings_of()
    settings = Settings(settings.models, autoscaler=AutoscalerSettings(period_s=0.1, stale_s=0.5, advisory=True))
    scaler = Autoscaler(settings, "m", lambda: MemoryBroker(QueueSettings()))
    assert [scaler.decide(number, now_s=float(number + 1)) for number in range(9, 0, -1)] == list(range(9, 0, -1))


def test_a_fault_in_a_decision_is_not_the_controllers() -> None:
    scaler = Autoscaler(settings_of(), "m", lambda: MemoryBroker(QueueSettings()))
    scaler._reading = "nonsense"  # type: ignore[assignment]
    assert scaler.decide(5, now_s=10.0) == 5


def test_f2_the_first_waiting_job_wakes_one_replica_in_the_same_period() -> None:
    config = Config(min_replicas=0, max_replicas=4, start_up_s=8.0)
    idle, state = decide_over(quiet(5), config)
    assert {each.target for each in idle} == {0}
    one = Signals(at_s=6.0, waiting=1, waiting_tokens=10, arrived_jobs=1, arrived_tokens=10)
    decision = law.desired(one, state, config)
    assert (decision.target, decision.reason) == (1, "wake")


def test_f2_one_request_is_not_answered_with_more_than_one_replica_while_it_starts() -> None:
    config = Config(min_replicas=0, max_replicas=4, start_up_s=8.0)
    _, state = decide_over(quiet(3), config)
    waits = quiet(8, 3.0, waiting=1, waiting_tokens=10, arrived_jobs=1, arrived_tokens=10, starting=1)
    made, _ = decide_over(waits, config, state)
    assert {each.target for each in made} == {1}


def test_f2_from_zero_all_of_two_hundred_are_served() -> None:
    config = Config(min_replicas=0, max_replicas=8, start_up_s=8.0, idle_s=60.0)
    model, world = ReplicaModel(), World(start_up_s=8.0, max_replicas=8)
    burst = joined((0.0, even(1000, 0.2, 500, 50)), (300.0, even(1, 5, 500, 50)))
    run = played(burst, model, world, Watched(config), 0)
    assert (run.ttft_s < 60).all()
    assert run.targets[0] == (0.0, 0) and run.targets[1][1] >= 1 and run.targets[1][0] <= 1.0


def test_f3_after_work_and_silence_everything_reads_zero_and_stays_so() -> None:
    config = Config(min_replicas=0, max_replicas=8, start_up_s=5.0, hold_s=20.0, idle_s=60.0)
    model, world = ReplicaModel(), World(start_up_s=5.0, max_replicas=8)
    policy = Watched(config)
    # the last two only keep the clock going
    trace = joined((0.0, even(40, 60, 2000, 100)), (600.0, even(1, 2, 1, 1)))
    run = played(trace, model, world, policy, 1)
    before = [seen for seen in policy.seen if 400 < seen.at_s < 600]
    assert {(seen.waiting, seen.running, seen.waiting_tokens, seen.ready) for seen in before} == {(0, 0, 0, 0)}
    assert [at for at, _ in run.targets if 300 < at < 600] == []
    assert max(number for _, number in run.targets) > 1


async def test_f3_jobs_that_leave_in_every_way_leave_nothing_counted() -> None:
    broker = MemoryBroker(QueueSettings(max_waiting_jobs=1000))
    await broker.present("replicas", "r", "m", {"model": "m", "state": "ready"})
    jobs = [await admit(broker, prompt_tokens=10) for _ in range(60)]
    for job in jobs[:20]:
        await broker.cancel(job, "client")
    for each in await broker.claim(0, "r", "m", 40):
        await broker.release("r", each.job.id, each.attempt, f"{each.attempt}-0")
        await broker.cancel(each.job.id, "client")
    seen = await read(broker, Totals())
    assert (seen.waiting, seen.running, seen.waiting_tokens, seen.oldest_s) == (0, 0, 0, 0)


def test_a_restart_of_the_controller_changes_nothing() -> None:
    busy = quiet(30, ready=3, running=20, arrived_jobs=5000, arrived_tokens=5_000_000)
    made, _ = decide_over(busy, Config(min_replicas=1, max_replicas=8), State())
    assert {each.target for each in made} == {3}


def test_a_long_gap_between_readings_is_no_burst() -> None:
    config = Config(max_replicas=8)
    _, state = decide_over(quiet(5, ready=1), config)
    after = law.desired(Signals(at_s=900.0, ready=1, arrived_jobs=9000, arrived_tokens=9_000_000), state, config)
    assert (after.target, after.reason) == (1, "resumed")


def test_counts_that_begin_anew_are_no_burst() -> None:
    config = Config(max_replicas=8)
    _, state = decide_over(quiet(20, ready=1, arrived_jobs=10**6, arrived_tokens=10**9), config)
    made, _ = decide_over(quiet(20, 20.0, ready=1, arrived_jobs=3, arrived_tokens=900), config, state)
    assert {each.target for each in made} == {1}


def test_ups_come_in_bounded_steps() -> None:
    config = Config(max_replicas=100, start_up_s=1.0)
    _, state = decide_over(quiet(2, ready=1), config)
    flood = Signals(at_s=2.5, waiting=10**6, waiting_tokens=10**9, ready=1, arrived_jobs=10**6, arrived_tokens=10**9)
    assert law.desired(flood, state, config).target <= 5


def test_downs_wait_for_the_hold_and_go_to_the_most_that_was_wanted() -> None:
    config = Config(max_replicas=8, start_up_s=5.0, hold_s=50.0)
    model, world = ReplicaModel(), World(start_up_s=5.0, max_replicas=8)
    trace = joined((0.0, even(60, 300, 1000, 100)), (300.0, even(4, 600, 1000, 100)))
    run = played(trace, model, world, Watched(config), 4)
    downs = [at for at in times_of(run, -1) if at > 300]
    assert downs and downs[0] >= 350
