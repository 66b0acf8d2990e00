"""A model that the cluster has no place for: the reason is told to who asks, to who waits, and to who looks."""

from __future__ import annotations

import pytest

from headrace.broker.errors import NoCapacity
from headrace.broker.messages import Ended
from headrace.broker.protocol import Broker
from tests.broker.steps import MakeBroker, admit, log_of
from tests.support import an_admission, eventually

WHY = "this model cannot be placed: no node has 4 GPUs"


async def test_who_asks_is_told_why_there_is_no_capacity(broker: Broker) -> None:
    await broker.note_unplaced("m", WHY)
    await admit(broker)  # what counts is whether anybody offers capacity
    await broker.absent("cluster", "test", "m")
    with pytest.raises(NoCapacity) as refused:
        await broker.admit(an_admission())
    assert refused.value.message == WHY


async def test_who_waits_is_told_too(make_broker: MakeBroker) -> None:
    broker = await make_broker(2)
    jobs = [await admit(broker, job_id=f"{shard:04x}{'5' * 28}") for shard in (0, 1)]
    await broker.note_unplaced("m", WHY)
    await broker.absent("cluster", "test", "m")
    for shard, job_id in enumerate(jobs):
        assert (await broker.reap(shard)).no_capacity == 1
        ended = (await log_of(broker, job_id))[-1].events[-1]
        assert isinstance(ended, Ended) and ended.error is not None
        assert (ended.error.code, ended.error.message) == ("no_capacity", WHY)


async def test_it_is_known_until_it_is_taken_back_or_not_said_again(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.1)

    async def why(model: str = "m") -> str:
        return (await broker.stats(model)).unplaced

    assert await why() == ""
    await broker.note_unplaced("m", WHY)
    assert (await why(), await why("other")) == (WHY, "")
    await broker.note_unplaced("m", "")
    assert await why() == ""
    await broker.note_unplaced("m", WHY)

    async def is_lapsed() -> bool:
        return await why() == ""

    await eventually(is_lapsed)
    await broker.absent("cluster", "test", "m")
    with pytest.raises(NoCapacity) as refused:
        await broker.admit(an_admission())
    assert refused.value.message == "No replica serves this model and none is starting."
