"""The promise of `protocol.Broker`, on both brokers: what runs out, what is there, and who is woken."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.errors import NoCapacity
from headrace.broker.protocol import Asking, Broker, ModelStats, Reaped
from tests.broker.steps import (
    Ears,
    MakeBroker,
    admit,
    append,
    claim,
    claim_ids,
    end_of,
    finish,
    log_of,
    lose_worker,
    reap,
    serve,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import an_admission, eventually

# -- reap ------------------------------------------------------------------------------------------------------------


async def test_reap_finds_nothing_where_nothing_has_run_out(broker: Broker) -> None:
    await admit(broker, pod="p", grace_ms=0)
    await claim(broker)
    await admit(broker, pod="p", grace_ms=0)
    assert await broker.reap(0) == Reaped(0, 0, 0, 0)


async def test_a_job_whose_lease_ran_out_is_continued_after_its_last_entry(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await admit(broker, band="batch")
    await claim(broker, "r1")
    await append(broker, job_id, "1-1")
    await lose_worker(broker)
    await admit(broker, band="interactive")
    claimed = await claim(broker, "r2")
    assert (claimed.job.id, claimed.attempt, claimed.after) == (job_id, 2, "1-1")


async def test_after_a_time_in_which_nobody_reaped_leases_can_be_renewed_first(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.5)
    job_id = await admit(broker)
    await claim(broker, "r1")
    await broker.reap(0)
    await asyncio.sleep(0.6)  # as if the broker had been away
    assert await broker.reap(0) == Reaped(0, 0, 0, 0)
    ticked = await tick(broker, "r1", renew=True, list_held=True)
    assert ticked.jobs == [job_id]
    await serve(broker)
    assert await broker.reap(0) == Reaped(0, 0, 0, 0)
    await lose_worker(broker)
    assert await state_of(broker, job_id) == "waiting"


async def test_reaps_that_are_always_late_do_act(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.05)
    await admit(broker, pod="p", grace_ms=0)
    await claim(broker)
    reaped = []
    for _ in range(4):
        reaped.append((await reap(broker)).leases)
        await asyncio.sleep(0.1)
    assert sum(reaped) == 1


async def test_a_lost_lease_is_news_for_the_worker_that_had_it(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await admit(broker)
    await claim(broker, "r1")
    await lose_worker(broker)
    ticked = await tick(broker, "r1", list_held=True)
    assert [(news.job_id, news.attempt) for news in ticked.news] == [(job_id, None)]
    assert (ticked.held, ticked.jobs) == (0, [])


async def test_a_lost_lease_is_a_death_only_after_something_was_appended(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await admit(broker)
    await claim(broker)
    await lose_worker(broker)
    assert await _deaths(broker, job_id) == 0
    await claim(broker)
    await append(broker, job_id, "2-1")
    await lose_worker(broker)
    assert await _deaths(broker, job_id) == 1


async def test_the_last_allowed_death_of_a_worker_ends_its_job(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1, max_deaths=2)
    job_id = await admit(broker)
    for attempt in (1, 2):
        await claim(broker)
        await append(broker, job_id, f"{attempt}-1")
        await lose_worker(broker)
    assert await end_of(broker, job_id) == ("3-0", "failed", "too_many_deaths")
    assert await claim_ids(broker, 1) == []


async def test_a_marked_job_whose_worker_is_lost_ends_as_cancelled(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    await lose_worker(broker)
    assert await end_of(broker, job_id) == ("2-0", "cancelled", "cancelled")


async def test_a_worker_that_comes_too_late_for_its_lease_may_still_settle(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await admit(broker)
    await claim(broker)
    await lose_worker(broker)
    assert await append(broker, job_id, "1-1") == "ok"
    assert await settle(broker, job_id, 1, "1-1") == "ok"
    assert await claim_ids(broker, 1) == []


async def test_a_job_that_waits_too_long_ends_as_failed(make_broker: MakeBroker) -> None:
    broker = await make_broker(queue_timeout_s=0.1)
    job_id = await admit(broker)

    async def has_timed_out() -> bool:
        return (await reap(broker)).timeouts == 1

    await eventually(has_timed_out)
    assert await end_of(broker, job_id) == ("1-0", "failed", "timeout")
    assert await claim_ids(broker, 1) == []


async def test_waiting_jobs_end_when_nobody_serves_their_model_any_more(broker: Broker) -> None:
    waiting, running = await admit(broker), await admit(broker, band="interactive")
    await claim(broker)
    await broker.absent("cluster", "test", "m")
    assert await broker.reap(0) == Reaped(0, 0, 0, 1)
    assert await end_of(broker, waiting) == ("1-0", "failed", "no_capacity")
    assert await state_of(broker, running) == "running"


async def test_capacity_lapses_if_it_is_not_renewed(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    await admit(broker)

    async def is_lapsed() -> bool:
        return (await broker.reap(0)).no_capacity == 1

    await eventually(is_lapsed)
    with pytest.raises(NoCapacity):
        await broker.admit(an_admission())


async def test_a_second_reap_finds_nothing_left(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    await admit(broker)
    await claim(broker)
    await lose_worker(broker)
    assert await reap(broker) == Reaped(0, 0, 0, 0)


async def _deaths(broker: Broker, job_id: str) -> int:
    status = await broker.status(job_id)
    assert status is not None
    return status.deaths


# -- status and stats ------------------------------------------------------------------------------------------------


async def test_status_follows_a_job(broker: Broker) -> None:
    job_id = await admit(broker)
    status = await broker.status(job_id)
    assert status is not None
    assert (status.state, status.last, status.attempt, status.ahead) == ("waiting", "0-1", 0, 0)
    assert status.view == an_admission().view
    await claim(broker)
    status = await broker.status(job_id)
    assert status is not None
    assert (status.state, status.last, status.attempt, status.ahead) == ("running", "1-0", 1, None)
    await settle(broker, job_id, 1, "1-0")
    status = await broker.status(job_id)
    assert status is not None
    assert (status.state, status.last, status.ahead) == ("done", "1-1", None)
    assert status.view == an_admission().view


async def test_status_counts_the_jobs_ahead_in_all_bands(broker: Broker) -> None:
    batch = await admit(broker, band="batch")
    ahead = [await admit(broker, band="default"), await admit(broker, band="interactive")]
    last = await admit(broker, band="batch")
    statuses = [await broker.status(job_id) for job_id in (ahead[1], ahead[0], batch, last)]
    assert [status.ahead for status in statuses if status] == [0, 1, 2, 3]


async def test_status_of_an_unknown_job_is_none(broker: Broker) -> None:
    assert await broker.status(unknown_id()) is None


async def test_stats_count_waiting_and_running_jobs(broker: Broker) -> None:
    await broker.present("replicas", "r", "m", {"slots": 4})
    for band in ("batch", "default", "default"):
        await admit(broker, band=band)
    await claim(broker)
    stats = await broker.stats("m")
    assert stats.waiting == {"resume": 0, "interactive": 0, "default": 1, "batch": 1}
    assert stats.running == 1
    assert stats.oldest_ms < 5000
    assert await broker.stats("other") == ModelStats(dict.fromkeys(stats.waiting, 0), 0, 0)


async def test_stats_know_the_age_of_the_oldest_waiting_job(broker: Broker) -> None:
    await admit(broker)

    async def is_older() -> bool:
        return (await broker.stats("m")).oldest_ms >= 20

    await eventually(is_older)


async def test_the_oldest_job_need_not_be_the_next(broker: Broker) -> None:
    """With fairness it is not: somebody's second job waits longer than the first one of a newcomer."""
    await admit(broker, owner="many")
    await admit(broker, owner="many")
    await claim(broker)

    async def is_older() -> bool:
        return (await broker.stats("m")).oldest_ms >= 20

    await eventually(is_older)
    await admit(broker, owner="newcomer")
    assert (await broker.stats("m")).oldest_ms >= 20


async def test_stats_add_up_all_shards(make_broker: MakeBroker) -> None:
    broker = await make_broker(shards=2)
    await broker.admit(an_admission("0000" + unknown_id()[4:]))
    await broker.admit(an_admission("0001" + unknown_id()[4:]))
    assert (await broker.stats("m")).waiting["default"] == 2
    assert len(await broker.claim(1, "r", "m", 9)) == 1


async def test_an_ended_job_leaves_no_trace_in_the_stats(broker: Broker) -> None:
    await broker.present("replicas", "r", "m", {})
    job_id = await finish(broker)
    assert (await broker.stats("m")).running == 0
    assert len(await log_of(broker, job_id)) == 3


# -- wake-ups --------------------------------------------------------------------------------------------------------


async def test_admit_wakes_exactly_one_idle_replica(broker: Broker, ears: Ears) -> None:
    first, second = await ears.replica(broker, "r1"), await ears.replica(broker, "r2")
    assert await broker.claim(0, "r1", "m", 1) == []
    assert await broker.claim(0, "r2", "m", 1) == []
    await admit(broker)
    await eventually(lambda: first == [0])
    assert second == []
    await admit(broker)
    await eventually(lambda: second == [0])
    await admit(broker)  # nobody is idle any more
    third = await ears.replica(broker, "r3")
    await broker.claim(0, "r3", "m", 9)
    await admit(broker)
    await eventually(lambda: third == [0])
    assert (first, second) == ([0], [0])


async def test_a_replica_is_told_which_shard_has_work(make_broker: MakeBroker, ears: Ears) -> None:
    broker = await make_broker(shards=2)
    woken = await ears.replica(broker, "r")
    for shard in range(2):
        assert await broker.claim(shard, "r", "m", 1) == []
    await broker.admit(an_admission("0001" + unknown_id()[4:]))
    await eventually(lambda: woken == [1])


async def test_a_claim_that_got_all_it_asked_for_is_not_idle(broker: Broker, ears: Ears) -> None:
    busy, idle = await ears.replica(broker, "busy"), await ears.replica(broker, "idle")
    assert await broker.claim(0, "busy", "m", 1) == []
    await admit(broker)
    await claim(broker, "busy")
    await broker.claim(0, "idle", "m", 1)
    await eventually(lambda: busy == [0])
    await admit(broker)
    await eventually(lambda: idle == [0])
    assert busy == [0]


async def test_a_claim_says_whether_the_replica_is_idle_now(broker: Broker) -> None:
    for _ in range(3):
        await admit(broker)
    assert not (await broker.claim(0, "r", "m", 1)).is_idle
    assert not (await broker.claim(0, "r", "m", 9, Asking(enough_tokens=1))).is_idle
    assert (await broker.claim(0, "r", "m", 9)).is_idle
    assert (await broker.claim(0, "r", "m", 9)).is_idle


async def test_a_replica_that_asks_again_is_idle_once(broker: Broker, ears: Ears) -> None:
    often, once = await ears.replica(broker, "often"), await ears.replica(broker, "once")
    for replica in ("often", "often", "once", "often"):
        await broker.claim(0, replica, "m", 1)
    for _ in range(2):
        await admit(broker)
    await eventually(lambda: (often, once) == ([0], [0]))


async def test_idle_replicas_without_a_connection_are_passed_over(broker: Broker, ears: Ears) -> None:
    alive = await ears.replica(broker, "alive")
    for replica in ("dead", "dead too", "alive"):
        await broker.claim(0, replica, "m", 1)
    await admit(broker)
    await eventually(lambda: alive == [0])


async def test_a_replica_that_left_is_not_woken(broker: Broker, ears: Ears) -> None:
    leaving, staying = await ears.replica(broker, "r1"), await ears.replica(broker, "r2")
    await broker.claim(0, "r1", "m", 1)
    await broker.claim(0, "r2", "m", 1)
    await broker.absent("replicas", "r1", "m")
    await admit(broker)
    await eventually(lambda: staying == [0])
    assert leaving == []


async def test_a_job_that_is_handed_back_wakes_a_replica(broker: Broker, ears: Ears) -> None:
    idle = await ears.replica(broker, "r2")
    job_id = await admit(broker)
    await claim(broker, "r1")
    await broker.claim(0, "r2", "m", 1)
    await broker.release("r1", job_id, 1, "1-0")
    await eventually(lambda: idle == [0])


# -- presence --------------------------------------------------------------------------------------------------------


async def test_what_is_present_is_listed_until_it_leaves(broker: Broker) -> None:
    await broker.present("replicas", "r", "m", {"pid": 7, "state": "ready"})
    await broker.present("pods", "p", "", {"pid": 8})
    assert await broker.listing("replicas") == {"r": {"pid": "7", "state": "ready"}}
    assert await broker.listing("pods") == {"p": {"pid": "8"}}
    await broker.absent("replicas", "r", "m")
    await broker.absent("pods", "p", "")
    assert await broker.listing("replicas") == {}
    assert await broker.listing("pods") == {}


async def test_a_repeated_presence_replaces_what_was_said(broker: Broker) -> None:
    await broker.present("replicas", "r", "m", {"state": "starting"})
    await broker.present("replicas", "r", "m", {"state": "ready"})
    assert await broker.listing("replicas") == {"r": {"state": "ready"}}


async def test_presence_lapses(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.5)
    await broker.present("replicas", "r", "m", {"pid": 7})
    assert await broker.listing("replicas") == {"r": {"pid": "7"}}

    async def has_lapsed() -> bool:
        return await broker.listing("replicas") == {}

    await eventually(has_lapsed)


async def test_a_replica_is_capacity_for_its_model(broker: Broker) -> None:
    await broker.absent("cluster", "test", "m")
    await broker.present("replicas", "r", "m", {})
    assert (await broker.admit(an_admission())).is_new


async def test_ping_answers_a_share(broker: Broker) -> None:
    await serve(broker)
    assert 0.0 <= await broker.ping() <= 1.0


async def test_a_job_whose_worker_died_is_ended_when_nobody_serves_its_model_any_more(
    make_broker: MakeBroker,
) -> None:
    """Its queue had been empty since the claim; handed back, it must be found again."""
    broker = await make_broker(lease_s=0.2)
    admission = an_admission()
    await broker.admit(admission)
    await broker.reap(0)
    await broker.claim(0, "r1", "m", 1)
    await broker.reap(0)

    async def has_ended() -> bool:
        await broker.reap(0)
        status = await broker.status(admission.job.id)
        return status is not None and status.state == "failed"

    await eventually(has_ended)
