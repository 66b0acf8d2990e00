"""The promise of `protocol.Broker`, on both brokers: jobs handed back or cancelled, and how replicas learn it."""

from __future__ import annotations

from headrace.broker.protocol import Broker
from tests.broker.steps import (
    MakeBroker,
    admit,
    append,
    claim,
    claim_ids,
    end_of,
    finish,
    reap,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import eventually

# -- release ---------------------------------------------------------------------------------------------------------


async def test_release_puts_a_job_before_all_others(broker: Broker) -> None:
    released = await admit(broker, band="batch")
    await claim(broker)
    other = await admit(broker, band="interactive")
    assert await broker.release("r", released, 1, "1-0") == "ok"
    assert await claim_ids(broker, 2) == [released, other]


async def test_released_jobs_keep_their_age(broker: Broker) -> None:
    admitted = [await admit(broker) for _ in range(9)]
    await claim_ids(broker, 9)
    for job_id in (*admitted[4:], *admitted[:4]):
        await broker.release("r", job_id, 1, "1-0")
    assert await claim_ids(broker, 9) == admitted


async def test_release_frees_the_lease_and_tells_its_holder(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0")
    ticked = await tick(broker, list_held=True)
    assert (ticked.held, ticked.jobs) == (0, [])
    assert [(news.job_id, news.attempt) for news in ticked.news] == [(job_id, None)]


async def test_release_of_a_job_that_another_holds_is_stale(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker, "r1")
    assert await broker.release("r2", job_id, 1, "1-0") == "stale"
    assert await broker.release("r2", job_id, None, None) == "stale"
    assert await state_of(broker, job_id) == "running"


async def test_release_behind_the_log_says_so(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    assert await broker.release("r", job_id, 1, "1-0") == "behind"
    assert await state_of(broker, job_id) == "running"


async def test_release_of_an_older_attempt_of_the_same_replica_is_stale(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0")
    await claim(broker)
    assert await broker.release("r", job_id, 1, "1-0") == "stale"
    assert await state_of(broker, job_id) == "running"


async def test_release_of_what_nobody_holds_is_gone(broker: Broker) -> None:
    job_id = await admit(broker)
    assert await broker.release("r", job_id, None, None) == "gone"
    assert await broker.release("r", unknown_id(), 1, "1-0") == "gone"
    assert await claim_ids(broker, 2) == [job_id]


async def test_release_of_a_marked_job_ends_it_as_cancelled(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    assert await broker.release("r", job_id, 1, "1-0") == "ok"
    assert await end_of(broker, job_id) == ("2-0", "cancelled", "cancelled")
    assert await claim_ids(broker, 1) == []


async def test_a_release_counts_a_death_only_if_told_to(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0")
    await claim(broker)
    await broker.release("r", job_id, 2, "2-0", is_death=True)
    status = await broker.status(job_id)
    assert status is not None
    assert (status.state, status.deaths) == ("waiting", 1)


async def test_the_last_allowed_death_ends_the_job_as_failed(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=2)
    job_id = await admit(broker)
    for attempt in (1, 2):
        await claim(broker)
        await broker.release("r", job_id, attempt, f"{attempt}-0", is_death=True)
    assert await end_of(broker, job_id) == ("3-0", "failed", "too_many_deaths")
    assert await claim_ids(broker, 1) == []


# -- cancel ----------------------------------------------------------------------------------------------------------


async def test_cancel_ends_a_waiting_job_at_once(broker: Broker) -> None:
    job_id = await admit(broker)
    assert await broker.cancel(job_id, "test") == "waiting"
    assert await end_of(broker, job_id) == ("1-0", "cancelled", "cancelled")
    assert await claim_ids(broker, 1) == []
    assert (await broker.stats("m")).waiting["default"] == 0


async def test_cancel_ends_a_job_that_was_handed_back_above_all_its_attempts(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    await broker.release("r", job_id, 1, "1-1")
    assert await broker.cancel(job_id, "test") == "waiting"
    assert await end_of(broker, job_id) == ("2-0", "cancelled", "cancelled")
    assert await append(broker, job_id, "1-2") == "stale"


async def test_cancel_marks_a_running_job_and_the_next_tick_tells(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    assert await broker.cancel(job_id, "test") == "running"
    [news] = (await tick(broker)).news
    assert (news.job_id, news.attempt, news.cancel) == (job_id, 1, "test")
    assert await state_of(broker, job_id) == "running"


async def test_the_first_cause_of_a_cancel_stands(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "first")
    assert await broker.cancel(job_id, "second") == "running"
    assert [news.cancel for news in (await tick(broker)).news] == ["first"]


async def test_cancel_of_an_ended_job_does_nothing(broker: Broker) -> None:
    job_id = await finish(broker)
    assert await broker.cancel(job_id, "test") == "ended"
    assert await end_of(broker, job_id) == ("1-1", "done", "")


async def test_cancel_of_an_unknown_job_says_so(broker: Broker) -> None:
    assert await broker.cancel(unknown_id(), "test") == "unknown"


async def test_a_marked_job_may_still_be_settled_by_its_worker(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    assert await settle(broker, job_id, 1, "1-0", "cancelled") == "ok"
    assert await state_of(broker, job_id) == "cancelled"


# -- tick ------------------------------------------------------------------------------------------------------------


async def test_news_stay_until_they_are_seen(broker: Broker) -> None:
    first, second = await admit(broker), await admit(broker)
    await claim_ids(broker, 2)
    await broker.cancel(first, "test")
    ticked = await tick(broker)
    assert await tick(broker) == ticked
    await broker.cancel(second, "test")
    later = await tick(broker, seen=ticked.serial)
    assert [news.job_id for news in later.news] == [second]
    assert (await tick(broker, seen=later.serial)).news == []


async def test_news_are_told_to_a_replica_that_has_seen_more_than_there_was(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    ticked = await tick(broker, seen=10**16)
    assert [news.cancel for news in ticked.news] == ["test"]
    assert ticked.serial < 10**16


async def test_a_tick_that_renews_keeps_the_lease(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.3)
    kept = await admit(broker)
    await claim(broker, "kept")
    await admit(broker)
    await claim(broker, "lost")

    async def is_lost() -> bool:
        await tick(broker, "kept", renew=True)
        return (await reap(broker)).leases == 1

    await eventually(is_lost)
    assert await state_of(broker, kept) == "running"
    assert (await tick(broker, "kept")).held == 1
