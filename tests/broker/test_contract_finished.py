"""The promise of `protocol.Broker`, on both brokers: what readers have seen finish ends as done, whoever is lost."""

from __future__ import annotations

import pytest
from msgspec import structs

from headrace.broker import messages
from headrace.broker.messages import Delta, Ended, Entry, Event, Finished, Started, TokenLogprob, Usage
from headrace.broker.protocol import Append, Broker
from tests.broker.steps import MakeBroker, claim, end_of, exchange, log_of, lose_worker, serve, state_of
from tests.support import an_admission

DELTA = Delta(0, " hi", [1, 2])
WITH_LOGPROBS = Delta(0, " hi", [1, 2], [TokenLogprob(1, b"\xe2", -0.5), TokenLogprob(2, b"\x82", -0.5)])
"""With bytes, which no script can read."""


async def run_to(broker: Broker, *events: Event, n: int = 1) -> str:
    """A job that a worker has claimed and written these events of, before it was lost."""
    await serve(broker)
    admission = an_admission()
    admission = structs.replace(admission, job=structs.replace(admission.job, n=n))
    await broker.admit(admission)
    job_id = admission.job.id
    await claim(broker)
    data = messages.encode(Entry(5, [Started(3, 1), *events]))
    is_finished = sum(isinstance(event, Finished) for event in events) == n
    usage = messages.encode(Usage(3, 2, 1)) if is_finished else b""
    assert (await exchange(broker, appends=[Append(job_id, "1-1", data, usage)])).appends == ["ok"]
    return job_id


async def ended(broker: Broker, job_id: str) -> Ended:
    """The log's last event, after a check that it is the only end."""
    await end_of(broker, job_id)
    last = (await log_of(broker, job_id))[-1].events[-1]
    assert isinstance(last, Ended)
    return last


@pytest.mark.parametrize("delta", [DELTA, WITH_LOGPROBS], ids=["plain", "log-probabilities"])
@pytest.mark.parametrize("is_marked", [True, False])
async def test_a_finished_job_whose_worker_was_lost_is_done_whatever_was_to_be_its_end(
    make_broker: MakeBroker, is_marked: bool, delta: Delta
) -> None:
    broker = await make_broker(lease_s=0.1, max_deaths=1)
    job_id = await run_to(broker, delta, Finished(0, "length"))
    if is_marked:
        assert await broker.cancel(job_id, "delete") == "running"
    await lose_worker(broker)
    assert await ended(broker, job_id) == Ended("done", None, Usage(3, 2, 1))
    assert await state_of(broker, job_id) == "done"
    assert await broker.dead_letters(0, 9) == []


async def test_a_finished_job_that_waits_for_its_end_is_done_when_it_is_cancelled(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await run_to(broker, DELTA, Finished(0, "stop"))
    await lose_worker(broker)
    assert await state_of(broker, job_id) == "waiting"
    await broker.cancel(job_id, "delete")
    assert (await ended(broker, job_id)).status == "done"


async def test_a_job_of_which_only_some_choices_are_finished_is_cancelled(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)
    job_id = await run_to(broker, DELTA, Finished(0, "stop"), n=2)
    await broker.cancel(job_id, "delete")
    await lose_worker(broker)
    assert (await ended(broker, job_id)).status == "cancelled"


async def test_a_finished_job_is_done_also_if_a_second_worker_is_lost_before_it_could_say_so(
    make_broker: MakeBroker,
) -> None:
    broker = await make_broker(lease_s=0.1, max_deaths=2)
    job_id = await run_to(broker, WITH_LOGPROBS, Finished(0, "stop"))
    await lose_worker(broker)
    await claim(broker, "second")
    await broker.cancel(job_id, "delete")
    await lose_worker(broker)
    assert await ended(broker, job_id) == Ended("done", None, Usage(3, 2, 1))
