"""The promise of `protocol.Broker`, on both brokers: how much may wait, who is refused, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker import messages
from headrace.broker.errors import OwnerQueueFull, QueueFull
from headrace.broker.messages import Band, Ended
from headrace.broker.protocol import Broker, Share
from tests.broker.steps import MakeBroker, admit, claim, claim_ids, end_of, log_of, reap, state_of
from tests.support import an_admission, eventually

BYTES = len(messages.encode(an_admission().job))


async def refusal(broker: Broker, **fields: Any) -> QueueFull:
    """How a job is refused, of which nothing is stored then."""
    admission = an_admission(**fields)
    waiting = (await broker.stats("m")).waiting
    with pytest.raises(QueueFull) as caught:
        await broker.admit(admission)
    assert await broker.status(admission.job.id) is None
    assert (await broker.stats("m")).waiting == waiting
    return caught.value


async def is_admitted(broker: Broker, **fields: Any) -> bool:
    return (await broker.admit(an_admission(**fields))).is_new


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"jobs": 3}, {"bytes": 3 * BYTES}, {"tokens": 30}], ids=str)
async def test_a_queue_is_full_at_each_of_its_bounds(make_broker: MakeBroker, bound: dict[str, int]) -> None:
    [(kind, most)] = bound.items()
    broker = await make_broker(**{f"max_waiting_{kind}": most})
    for owner in "abc":
        await admit(broker, owner=owner, prompt_tokens=10)
    assert type(await refusal(broker, owner="d", prompt_tokens=10)) is QueueFull
    await claim(broker)
    assert await is_admitted(broker, owner="d", prompt_tokens=10)


@pytest.mark.parametrize("bound", [{"jobs": 2}, {"bytes": 2 * BYTES}, {"tokens": 20}], ids=str)
async def test_an_owner_is_refused_at_each_of_its_bounds(broker: Broker, bound: dict[str, int]) -> None:
    [(kind, most)] = bound.items()
    fields = {"prompt_tokens": 10, "share": Share(**{f"max_waiting_{kind}": most})}
    await admit(broker, owner="a", **fields)
    await admit(broker, owner="a", band="interactive", **fields)
    refused = await refusal(broker, owner="a", **fields)
    assert isinstance(refused, OwnerQueueFull)
    assert (refused.status, refused.code) == (429, "owner_queue_full")
    assert await is_admitted(broker, owner="b", **fields)
    await claim(broker)
    assert await is_admitted(broker, owner="a", **fields)


async def test_a_job_that_is_larger_than_a_bound_fits_into_an_empty_queue(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_tokens=10)
    assert await is_admitted(broker, prompt_tokens=1000)
    await refusal(broker, prompt_tokens=1)


async def test_a_job_that_is_handed_back_waits_again_and_is_never_refused(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    job_id = await admit(broker, prompt_tokens=7)
    await claim(broker)
    assert (await broker.stats("m")).prompt_tokens == 0
    await admit(broker)
    assert await broker.release("r", job_id, 1, "1-0") == "ok"
    assert (await broker.stats("m")).prompt_tokens == 7
    assert "2 requests wait" in (await refusal(broker)).message


async def test_stats_count_the_prompt_tokens_that_wait(broker: Broker) -> None:
    jobs = [await admit(broker, owner=owner, prompt_tokens=tokens) for owner, tokens in (("a", 3), ("b", 40))]
    assert (await broker.stats("m")).prompt_tokens == 43
    await broker.cancel(jobs[0], "test")
    assert (await broker.stats("m")).prompt_tokens == 40
    assert (await broker.stats("other")).prompt_tokens == 0


# -- batch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [{"jobs": 4}, {"bytes": 4 * BYTES}, {"tokens": 40}], ids=str)
async def test_batch_is_refused_from_its_share_of_each_bound_on(make_broker: MakeBroker, bound: dict[str, int]) -> None:
    [(kind, most)] = bound.items()
    broker = await make_broker(**{f"max_waiting_{kind}": most, "batch_share": 0.5})
    await admit(broker, prompt_tokens=10)
    assert await is_admitted(broker, band="batch", prompt_tokens=10)
    await refusal(broker, band="batch", prompt_tokens=10)
    assert await is_admitted(broker, band="default", prompt_tokens=10)


@pytest.mark.parametrize("band", ["interactive", "default"])
async def test_a_full_queue_ends_the_youngest_batch_job_for_a_better_one(make_broker: MakeBroker, band: Band) -> None:
    broker = await make_broker(max_waiting_jobs=3, batch_share=1.0)
    batch = [await admit(broker, band="batch") for _ in range(3)]
    better = await admit(broker, band=band)
    assert await end_of(broker, batch[2]) == ("1-0", "failed", "queue_full")
    assert await claim_ids(broker, 9) == [better, *batch[:2]]


async def test_a_batch_job_that_made_room_says_so_to_its_readers(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    batch = await admit(broker, band="batch", pod="p")
    await admit(broker)
    ended = (await log_of(broker, batch))[-1].events[-1]
    assert isinstance(ended, Ended) and ended.error
    assert "made room" in ended.error.message


async def test_a_running_batch_job_makes_no_room(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    batch = await admit(broker, band="batch")
    await claim(broker)
    await admit(broker)
    await refusal(broker)
    assert await state_of(broker, batch) == "running"


async def test_as_many_batch_jobs_end_as_are_needed_and_no_more(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_tokens=100, batch_share=1.0)
    owners = {"a": 40, "b": 30, "c": 5, "d": 25}
    batch = [await admit(broker, band="batch", owner=owner, prompt_tokens=owners[owner]) for owner in owners]

    async def states() -> list[str]:
        return [await state_of(broker, job_id) for job_id in batch]

    await admit(broker, prompt_tokens=30)
    assert await states() == ["waiting", "waiting", "waiting", "failed"]
    await admit(broker, prompt_tokens=10)
    assert await states() == ["waiting", "failed", "failed", "failed"]


async def test_no_batch_job_ends_if_that_would_not_make_room(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_tokens=100)
    batch = await admit(broker, band="batch", prompt_tokens=10)
    await admit(broker, prompt_tokens=100)
    await refusal(broker)
    assert await state_of(broker, batch) == "waiting"


async def test_no_batch_job_ends_for_an_owner_that_is_at_its_own_bound(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=2, batch_share=1.0)
    await admit(broker, owner="a")
    batch = await admit(broker, owner="b", band="batch")
    await refusal(broker, owner="a", share=Share(max_waiting_jobs=1))
    assert await state_of(broker, batch) == "waiting"


# -- retry after -----------------------------------------------------------------------------------------------------


async def test_without_a_measured_rate_a_refused_request_may_return_in_five_seconds(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=1)
    await admit(broker)
    assert (await refusal(broker)).retry_after_s == 5


async def test_retry_after_is_the_longer_the_slower_the_queue_drains(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=40)
    # 40 wait: a tenth of them at n / 30 s
    assert await _retry_after_s(broker, drained=2, waiting=40) == 60
    assert await _retry_after_s(broker, drained=10, waiting=40) in (10, 11)
    assert await _retry_after_s(broker, drained=188, waiting=40) == 1


async def _retry_after_s(broker: Broker, drained: int, waiting: int) -> int:
    for _ in range(drained):
        await admit(broker)
        await claim(broker)
    jobs = [await admit(broker) for _ in range(waiting)]
    found = (await refusal(broker)).retry_after_s
    for job_id in jobs:
        await broker.cancel(job_id, "test")
    assert found is not None
    return found


# -- deadline --------------------------------------------------------------------------------------------------------


async def test_a_job_waits_no_longer_than_it_asked_for(broker: Broker) -> None:
    hasty, patient = await admit(broker, queue_timeout_ms=100), await admit(broker)

    async def has_timed_out() -> bool:
        return (await reap(broker)).timeouts == 1

    await eventually(has_timed_out)
    assert await end_of(broker, hasty) == ("1-0", "failed", "timeout")
    assert await claim_ids(broker, 9) == [patient]


async def test_a_deadline_is_for_the_wait_and_not_for_the_run(broker: Broker) -> None:
    job_id = await admit(broker, queue_timeout_ms=1)
    await claim(broker)
    later = await admit(broker, queue_timeout_ms=20)

    async def has_timed_out() -> bool:
        await reap(broker)
        return await state_of(broker, later) == "failed"

    await eventually(has_timed_out)
    assert await state_of(broker, job_id) == "running"
