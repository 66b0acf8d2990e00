"""The promise of `protocol.Broker`, on both brokers: jobs that are kept whole, and jobs that are forgotten."""

from __future__ import annotations

import pytest

from headrace.broker.protocol import Broker
from tests.broker.steps import (
    Ears,
    MakeBroker,
    admit,
    append,
    claim,
    end_of,
    ids_of,
    lose_worker,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import an_admission, eventually


async def finished(broker: Broker, **fields: bool) -> str:
    job_id = await admit(broker, **fields)
    await claim(broker)
    assert await settle(broker, job_id, 1, "1-0") == "ok"
    return job_id


async def test_what_a_job_asks_for_is_known_until_its_end_and_then_only_if_it_is_kept(broker: Broker) -> None:
    kept = an_admission(is_kept=True)
    await broker.admit(kept)
    assert await broker.job(kept.job.id) == kept.job
    assert (await claim(broker)).job == kept.job
    assert await broker.job(kept.job.id) == kept.job
    await settle(broker, kept.job.id, 1, "1-0")
    assert await broker.job(kept.job.id) == kept.job
    assert await broker.job(await finished(broker)) is None
    assert await broker.job(unknown_id()) is None


async def test_a_job_that_never_ran_is_kept_too(broker: Broker) -> None:
    job_id = await admit(broker, is_kept=True)
    assert await broker.cancel(job_id, "test") == "waiting"
    job = await broker.job(job_id)
    assert job is not None and job.id == job_id


async def test_a_kept_job_lives_for_its_own_time_and_that_is_bounded(make_broker: MakeBroker) -> None:
    broker = await make_broker(log_ttl_s=0.05, stored_ttl_s=0.4)
    kept, other = await finished(broker, is_kept=True), await finished(broker)

    async def is_gone(job_id: str) -> bool:
        return await state_of(broker, job_id) == "unknown"

    await eventually(lambda: is_gone(other))
    assert await state_of(broker, kept) == "done"
    assert await broker.job(kept) is not None
    await eventually(lambda: is_gone(kept))
    assert (await broker.job(kept), await ids_of(broker, kept)) == (None, [])


async def test_a_kept_job_lives_no_shorter_than_any_other(make_broker: MakeBroker) -> None:
    broker = await make_broker(log_ttl_s=600, stored_ttl_s=0)
    job_id = await finished(broker, is_kept=True)
    assert await state_of(broker, job_id) == "done"


async def test_a_forgotten_job_is_found_by_nobody(broker: Broker) -> None:
    job_id = await finished(broker, is_kept=True)
    assert await broker.forget(job_id) is True
    assert await broker.status(job_id) is None
    assert await broker.job(job_id) is None
    assert await broker.forget(job_id) is False
    assert await broker.forget(unknown_id()) is False


async def test_a_waiting_job_that_is_forgotten_ends_and_is_not_claimed(broker: Broker) -> None:
    job_id = await admit(broker, is_kept=True)
    assert await broker.forget(job_id) is True
    assert await broker.status(job_id) is None
    assert await broker.claim(0, "r", "m", 1) == []
    assert (await end_of(broker, job_id))[1:] == ("cancelled", "cancelled")
    assert await broker.job(job_id) is None


async def test_a_running_job_that_is_forgotten_is_cancelled_and_its_readers_see_the_end(
    broker: Broker, ears: Ears
) -> None:
    pod = await ears.pod(broker, "p")
    job_id = await admit(broker, pod="p", is_kept=True)
    await claim(broker)
    assert await broker.forget(job_id) is True
    assert await broker.status(job_id) is None
    [news] = (await tick(broker)).news
    assert (news.job_id, news.cancel) == (job_id, "delete")
    assert await broker.watch("p", [job_id]) == [True]
    await settle(broker, job_id, 1, "1-0", "cancelled")
    await eventually(lambda: "1-1" in pod.ids)
    assert (await broker.status(job_id), await broker.job(job_id)) == (None, None)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_forgotten_job_whose_worker_is_lost_ends(make_broker: MakeBroker, is_kept: bool) -> None:
    broker = await make_broker(lease_s=0.1, max_deaths=1)
    job_id = await admit(broker, is_kept=is_kept)
    await claim(broker)
    await append(broker, job_id, "1-1")
    await broker.forget(job_id)
    await lose_worker(broker)
    assert (await end_of(broker, job_id))[1] == "cancelled"
    assert await broker.dead_letters(0, 9) == []


async def test_a_forgotten_dead_letter_is_none(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_deaths=1)
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0", is_death=True)
    assert await broker.job(job_id) is not None
    await broker.forget(job_id)
    assert await broker.dead_letters(0, 9) == []
    assert await broker.dead_letter(job_id) is None
    assert await broker.job(job_id) is None
