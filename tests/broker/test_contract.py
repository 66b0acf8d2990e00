"""The promise of `protocol.Broker`, on both brokers: a job from its admission to its end.

`test_contract_*.py` go on with what interrupts a job, with its readers, with what runs out, and with who is there.
"""

from __future__ import annotations

import pytest

from headrace.broker.errors import NoCapacity, QueueFull
from headrace.broker.messages import Claimed, Queued
from headrace.broker.protocol import Append, Broker
from tests.broker.steps import (
    STEP,
    MakeBroker,
    admit,
    an_end,
    append,
    claim,
    claim_ids,
    end_of,
    exchange,
    finish,
    ids_of,
    last_id,
    log_of,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import an_admission

# -- admit -----------------------------------------------------------------------------------------------------------


async def test_admit_opens_the_log_with_queued(broker: Broker) -> None:
    admission = an_admission()
    admitted = await broker.admit(admission)
    assert (admitted.is_new, admitted.last) == (True, "0-1")
    [entry] = await log_of(broker, admission.job.id)
    assert entry.at_ms == 0
    assert isinstance(entry.events[0], Queued)


async def test_admit_of_a_known_id_answers_what_is_there(broker: Broker) -> None:
    admission = an_admission()
    await broker.admit(admission)
    await claim(broker)
    again = await broker.admit(admission)
    assert (again.is_new, again.last) == (False, "1-0")
    assert await claim_ids(broker, 1) == []


async def test_admit_of_an_ended_id_enqueues_nothing(broker: Broker) -> None:
    admission = an_admission()
    await broker.admit(admission)
    await broker.cancel(admission.job.id, "test")
    assert (await broker.admit(admission)).last == "1-0"
    assert await claim_ids(broker, 1) == []


async def test_admit_refuses_a_model_that_nobody_serves_and_stores_nothing(broker: Broker) -> None:
    admission = an_admission(model="other")
    with pytest.raises(NoCapacity):
        await broker.admit(admission)
    assert await broker.status(admission.job.id) is None
    assert await last_id(broker, admission.job.id) is None


async def test_admit_refuses_when_the_queue_is_full_and_stores_nothing(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=2)
    await admit(broker, band="default")
    await admit(broker, band="interactive")
    admission = an_admission()
    with pytest.raises(QueueFull):
        await broker.admit(admission)
    assert await broker.status(admission.job.id) is None
    assert await last_id(broker, admission.job.id) is None


async def test_running_jobs_do_not_fill_the_queue(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    await admit(broker)
    await claim(broker)
    assert (await broker.admit(an_admission())).is_new


async def test_a_queue_is_full_for_its_own_model_only(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    await admit(broker)
    await broker.present("cluster", "test", "other", {})
    assert (await broker.admit(an_admission(model="other"))).is_new


# -- claim -----------------------------------------------------------------------------------------------------------


async def test_bands_are_claimed_in_order(broker: Broker) -> None:
    batch = await admit(broker, band="batch")
    default = await admit(broker, band="default")
    interactive = await admit(broker, band="interactive")
    assert await claim_ids(broker, 3) == [interactive, default, batch]


async def test_inside_a_band_the_oldest_is_claimed_first(broker: Broker) -> None:
    admitted = [await admit(broker) for _ in range(12)]
    assert await claim_ids(broker, 5) == admitted[:5]
    assert await claim_ids(broker, 99) == admitted[5:]


async def test_claim_takes_jobs_of_its_model_only(broker: Broker) -> None:
    await admit(broker)
    assert await broker.claim(0, "r", "other", 1) == []


async def test_claim_opens_an_attempt_in_the_log(broker: Broker) -> None:
    job_id = await admit(broker, pod="p")
    claimed = await claim(broker)
    assert claimed.job == an_admission(job_id).job
    assert (claimed.attempt, claimed.after, claimed.readers) == (1, "0-1", ["p"])
    assert 0 <= claimed.waited_ms < 5000
    entries = await log_of(broker, job_id)
    assert [(entry.id, entry.events) for entry in entries[1:]] == [("1-0", [Claimed("r", "0-1")])]


async def test_the_next_claim_continues_after_the_last_entry(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker, "r1")
    await append(broker, job_id, "1-1")
    await broker.release("r1", job_id, 1, "1-1")
    claimed = await claim(broker, "r2")
    assert (claimed.attempt, claimed.after) == (2, "1-1")
    assert (await log_of(broker, job_id))[-1].events == [Claimed("r2", "1-1")]


async def test_a_claim_whose_answer_was_lost_is_mended_by_tick_and_release(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)  # suppose that the replica never hears of it
    assert (await tick(broker)).held == 1
    assert (await tick(broker, list_held=True)).jobs == [job_id]
    assert await broker.release("r", job_id, None, None) == "ok"
    assert (await tick(broker)).held == 0
    assert (await claim(broker)).after == "1-0"
    status = await broker.status(job_id)
    assert status is not None
    assert (status.attempt, status.deaths) == (2, 0)


# -- the log's fence -------------------------------------------------------------------------------------------------


async def test_an_append_of_an_older_attempt_is_stale_from_the_claim_on(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker, "r1")
    await broker.release("r1", job_id, 1, "1-0")
    await claim(broker, "r2")
    assert await append(broker, job_id, "1-1") == "stale"
    assert await append(broker, job_id, "2-1") == "ok"
    assert await ids_of(broker, job_id) == ["0-1", "1-0", "2-0", "2-1"]


async def test_an_append_that_is_there_already_is_stale(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    assert await append(broker, job_id, "1-1") == "ok"
    assert await append(broker, job_id, "1-1") == "stale"


async def test_an_append_to_a_log_that_is_not_there_is_gone(broker: Broker) -> None:
    job_id = unknown_id()
    assert await append(broker, job_id, "1-1") == "gone"
    assert await last_id(broker, job_id) is None


async def test_a_lane_answers_many_appends_in_their_order(broker: Broker) -> None:
    jobs = [await admit(broker) for _ in range(2)]
    await claim_ids(broker, 2)
    sent = [Append(jobs[0], "1-1", STEP), Append(unknown_id(), "1-1", STEP), Append(jobs[1], "0-9", STEP)]
    assert (await exchange(broker, appends=sent)).appends == ["ok", "gone", "stale"]


# -- settle ----------------------------------------------------------------------------------------------------------


async def test_settle_appends_the_one_end_after_the_last_entry(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    assert await settle(broker, job_id, 1, "1-1") == "ok"
    assert await end_of(broker, job_id) == ("1-2", "done", "")
    assert await state_of(broker, job_id) == "done"


async def test_settle_frees_the_lease(broker: Broker) -> None:
    await finish(broker)
    assert (await tick(broker, list_held=True)).jobs == []
    assert (await tick(broker)).held == 0


async def test_settle_may_be_repeated(broker: Broker) -> None:
    job_id = await finish(broker)
    assert await settle(broker, job_id, 1, "1-0") == "ok"
    assert await end_of(broker, job_id) == ("1-1", "done", "")


async def test_settle_of_an_older_attempt_is_stale(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker, "r1")
    await broker.release("r1", job_id, 1, "1-0")
    await claim(broker, "r2")
    assert await settle(broker, job_id, 1, "1-0") == "stale"
    assert await settle(broker, job_id, 1, "2-0") == "stale"
    assert await state_of(broker, job_id) == "running"


async def test_settle_behind_the_log_says_so_and_ends_nothing(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await append(broker, job_id, "1-1")
    assert await settle(broker, job_id, 1, "1-0") == "behind"
    assert await settle(broker, job_id, 1, "1-2") == "behind"
    assert await ids_of(broker, job_id) == ["0-1", "1-0", "1-1"]
    assert await state_of(broker, job_id) == "running"


async def test_settle_of_a_job_that_is_not_there_is_gone(broker: Broker) -> None:
    assert await settle(broker, unknown_id(), 1, "1-0") == "gone"


async def test_settle_of_a_job_that_was_handed_back_takes_it_out_of_the_queue(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0")
    assert await settle(broker, job_id, 1, "1-0") == "ok"
    assert await end_of(broker, job_id) == ("1-1", "done", "")
    assert (await broker.stats("m")).waiting["resume"] == 0
    assert await claim_ids(broker, 1) == []


async def test_settle_ends_a_job_once_even_if_another_had_ended_it(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0")
    await broker.cancel(job_id, "test")
    assert await settle(broker, job_id, 1, "1-0") == "stale"
    assert await end_of(broker, job_id) == ("2-0", "cancelled", "cancelled")


async def test_settle_in_one_exchange_with_the_last_append_finds_it(broker: Broker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    end = an_end(job_id, 1, "1-1", "failed")
    answers = await exchange(broker, appends=[Append(job_id, "1-1", STEP)], settles=[end])
    assert (answers.appends, answers.settles) == (["ok"], ["ok"])
    assert await end_of(broker, job_id) == ("1-2", "failed", "")
