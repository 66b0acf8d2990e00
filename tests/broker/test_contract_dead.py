"""The promise of `protocol.Broker`, on both brokers: dead letters, the wall limit, and the secret of a deployment."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.dead import requeue
from headrace.broker.errors import JobNotFound, NoCapacity, RequestPoisoned
from headrace.broker.protocol import Broker, Reaped
from tests.broker.steps import (
    MakeBroker,
    admit,
    append,
    claim,
    claim_ids,
    end_of,
    finish,
    ids_of,
    lose_worker,
    reap,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import an_admission, eventually


async def kill(broker: Broker, replica: str = "r") -> str:
    """A job on which the engine hung as often as it may (once, in these tests)."""
    job_id = await admit(broker)
    await claim(broker, replica)
    assert await broker.release(replica, job_id, 1, "1-0", is_death=True) == "ok"
    return job_id


# -- dead letters -----------------------------------------------------------------------------------------------------


async def test_a_job_that_hung_too_often_is_a_dead_letter_whole(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=2)
    job_id = await admit(broker, band="batch")
    for attempt in (1, 2):
        claimed = await claim(broker, f"r{attempt}")
        assert await broker.dead_letter(job_id) is None
        await broker.release(f"r{attempt}", job_id, attempt, f"{attempt}-0", is_death=True)
    assert await end_of(broker, job_id) == ("3-0", "failed", "too_many_deaths")
    letter = await broker.dead_letter(job_id)
    assert letter is not None
    assert letter.job == claimed.job
    assert (letter.view.owner, letter.view.band) == ("alice", "batch")
    assert (letter.deaths, letter.died_of, letter.died_with) == (2, "engine_hung", "r2")
    assert await broker.dead_letters(0, 10) == [letter]


async def test_a_job_whose_workers_were_all_lost_is_a_dead_letter(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1, max_deaths=1)
    job_id = await admit(broker)
    await claim(broker, "r9")
    await append(broker, job_id, "1-1")
    await lose_worker(broker)
    [letter] = await broker.dead_letters(0, 10)
    assert (letter.job.id, letter.deaths, letter.died_of, letter.died_with) == (job_id, 1, "worker_lost", "r9")


async def test_other_ends_are_no_dead_letters(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    done = await finish(broker)
    failed = await admit(broker)
    await claim(broker)
    await settle(broker, failed, 1, "1-0", "failed")
    cancelled = await admit(broker)
    await claim(broker)
    await broker.cancel(cancelled, "test")
    await broker.release("r", cancelled, 1, "1-0", is_death=True)
    assert await broker.dead_letters(0, 10) == []
    assert [await broker.dead_letter(job_id) for job_id in (done, failed, cancelled, unknown_id())] == [None] * 4


async def test_three_releases_are_no_deaths(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await admit(broker)
    for attempt in (1, 2, 3):
        await claim(broker)
        await append(broker, job_id, f"{attempt}-1")
        assert await broker.release("r", job_id, attempt, f"{attempt}-1") == "ok"
    status = await broker.status(job_id)
    assert status is not None
    assert (status.state, status.deaths) == ("waiting", 0)


async def test_dead_letters_are_listed_with_the_last_first(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    killed = []
    for _ in range(3):
        killed.append(await kill(broker))
        await asyncio.sleep(0.002)  # they are ordered by milliseconds
    assert [letter.job.id for letter in await broker.dead_letters(0, 10)] == killed[::-1]
    assert [letter.job.id for letter in await broker.dead_letters(0, 2)] == killed[:0:-1]


async def test_a_dead_letter_outlives_its_log_time_and_then_expires(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1, log_ttl_s=0.05, dead_letter_ttl_s=0.5)
    other, job_id = await finish(broker), await kill(broker)

    async def is_gone(gone: str) -> bool:
        return await broker.status(gone) is None

    await eventually(lambda: is_gone(other))
    assert await broker.dead_letter(job_id) is not None
    assert await ids_of(broker, job_id) == ["0-1", "1-0", "2-0"]
    await eventually(lambda: is_gone(job_id))
    assert await broker.dead_letters(0, 10) == []


async def test_an_expired_dead_letter_is_an_ended_job_like_any_other(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1, log_ttl_s=0.3)
    first, second = await kill(broker), await kill(broker)
    assert await broker.expire(first)
    assert not await broker.expire(first)
    assert not await broker.expire(unknown_id())
    assert [letter.job.id for letter in await broker.dead_letters(0, 10)] == [second]
    assert await state_of(broker, first) == "failed"

    async def is_gone() -> bool:
        return await broker.status(first) is None

    await eventually(is_gone)
    assert await broker.dead_letter(second) is not None


async def test_a_requeued_dead_letter_is_a_new_job_that_asks_for_the_same(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await kill(broker)
    letter = await broker.dead_letter(job_id)
    new_id = await requeue(broker, job_id)
    assert new_id != job_id
    assert await broker.dead_letters(0, 10) == []
    claimed = await claim(broker)
    assert (claimed.job.id, claimed.attempt) == (new_id, 1)
    assert letter is not None
    assert claimed.job.prompt == letter.job.prompt
    assert await end_of(broker, job_id) == ("2-0", "failed", "too_many_deaths")


async def test_requeuing_twice_makes_one_job(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await kill(broker)
    assert await requeue(broker, job_id) == await requeue(broker, job_id)
    assert len(await claim_ids(broker, 5)) == 1
    with pytest.raises(JobNotFound):
        await requeue(broker, unknown_id())


async def test_a_dead_letter_that_cannot_be_queued_now_stays(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await kill(broker)
    await broker.absent("cluster", "test", "m")
    with pytest.raises(NoCapacity):
        await requeue(broker, job_id)
    assert await broker.dead_letter(job_id) is not None


async def test_a_requeued_job_may_die_again(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    again = await requeue(broker, await kill(broker))
    await claim(broker)
    await broker.release("r", again, 1, "1-0", is_death=True)
    assert [letter.job.id for letter in await broker.dead_letters(0, 10)] == [again]
    assert await requeue(broker, again) != again


# -- the wall limit ---------------------------------------------------------------------------------------------------


async def overrun(broker: Broker) -> None:
    """Wait until the one job that has run for too long was found."""

    async def is_found() -> bool:
        return (await reap(broker)).overrun == 1

    await eventually(is_found)


async def test_a_job_that_runs_for_too_long_is_marked_once(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.1)
    job_id = await admit(broker)
    await claim(broker)
    assert await broker.reap(0) == Reaped(0, 0, 0, 0)
    await overrun(broker)
    [news] = (await tick(broker)).news
    assert (news.job_id, news.attempt, news.cancel) == (job_id, 1, "max_run")
    assert await state_of(broker, job_id) == "running"
    assert await reap(broker) == Reaped(0, 0, 0, 0)
    assert await settle(broker, job_id, 1, "1-0", "failed") == "ok"


async def test_a_job_that_only_waits_is_not_limited(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.05)
    job_id = await admit(broker)
    await asyncio.sleep(0.1)
    assert await reap(broker) == Reaped(0, 0, 0, 0)
    assert await state_of(broker, job_id) == "waiting"


async def test_the_limit_runs_from_the_first_claim_over_all_attempts(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.2)
    job_id = await admit(broker)
    loop = asyncio.get_running_loop()
    started_at, attempt = loop.time(), 0
    while (await reap(broker)).overrun == 0:
        assert loop.time() < started_at + 1
        attempt += 1
        await claim(broker)
        await broker.release("r", job_id, attempt, f"{attempt}-0")
        await asyncio.sleep(0.02)
    assert attempt > 2
    assert await end_of(broker, job_id) == (f"{attempt + 1}-0", "failed", "run_timeout")
    assert await claim_ids(broker, 1) == []


async def test_an_overrun_job_whose_worker_is_lost_ends_with_the_limits_code(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.05, lease_s=0.3)
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    await overrun(broker)
    await lose_worker(broker)
    assert await end_of(broker, job_id) == ("2-0", "failed", "run_timeout")
    assert await broker.dead_letters(0, 10) == []


async def test_an_overrun_job_that_is_handed_back_ends_with_the_limits_code(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.05)
    job_id = await admit(broker)
    await claim(broker)
    await overrun(broker)
    assert await broker.release("r", job_id, 1, "1-0") == "ok"
    assert await end_of(broker, job_id) == ("2-0", "failed", "run_timeout")


async def test_a_job_that_was_cancelled_before_its_limit_ends_as_cancelled(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.05)
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    await overrun(broker)
    await broker.release("r", job_id, 1, "1-0")
    assert await end_of(broker, job_id) == ("2-0", "cancelled", "cancelled")


async def test_a_job_that_has_ended_is_limited_no_more(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_run_s=0.05)
    await finish(broker)
    await asyncio.sleep(0.1)
    assert await reap(broker) == Reaped(0, 0, 0, 0)


# -- the secret -------------------------------------------------------------------------------------------------------


async def test_the_first_secret_that_is_offered_is_everybodys(make_broker: MakeBroker) -> None:
    broker = await make_broker(shards=2)
    assert await broker.secret(b"one") == b"one"
    assert await broker.secret(b"two") == b"one"


# -- what is not taken again ------------------------------------------------------------------------------------------


async def test_a_request_that_ended_as_a_dead_letter_is_refused_to_its_owner(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await admit(broker, digest="d" * 32)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0", is_death=True)
    with pytest.raises(RequestPoisoned) as caught:
        await admit(broker, digest="d" * 32)
    assert 3500 < (caught.value.retry_after_s or 0) <= 3600
    for digest in ("e" * 32, ""):
        assert await state_of(broker, await admit(broker, digest=digest)) == "waiting"
    assert not (await broker.admit(an_admission(job_id, digest="d" * 32))).is_new  # what is there is answered
    assert await state_of(broker, await requeue(broker, job_id)) == "waiting"  # the operator has looked at it


async def test_a_job_that_ends_otherwise_poisons_nothing(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=2)
    job_id = await admit(broker, digest="d" * 32)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0", is_death=True)
    await claim(broker)
    assert await settle(broker, job_id, 2, "2-0", "failed") == "ok"
    assert await state_of(broker, await admit(broker, digest="d" * 32)) == "waiting"
