"""The promise of `protocol.Broker`, on both brokers: the limits of keys and owners, and what was used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs

from headrace.broker import messages
from headrace.broker.errors import LimitReached, NoCapacity, QueueFull
from headrace.broker.limits import NONE, Allowance, Limits, Standing
from headrace.broker.messages import Ended, Entry, Status, Usage
from headrace.broker.protocol import Admission, Broker, Settle, Share
from tests.broker.steps import MakeBroker, append, claim, exchange, reap
from tests.support import an_admission, eventually

DAY = 100_000


@dataclass
class Key:
    """Requests with one key."""

    broker: Broker
    id: str = "k1"
    owner: str = "alice"
    of_key: Limits = NONE
    of_owner: Limits = NONE

    def admission(self, stream: bool = False, **fields: Any) -> Admission:
        made = an_admission(owner=self.owner, allowance=Allowance(self.id, self.of_key, self.of_owner), **fields)
        return structs.replace(made, view=structs.replace(made.view, stream=stream))

    async def ask(self, stream: bool = False, **fields: Any) -> str:
        admission = self.admission(stream, **fields)
        assert (await self.broker.admit(admission)).is_new
        return admission.job.id

    async def standing(self, **fields: Any) -> Standing:
        return (await self.broker.admit(self.admission(**fields))).standing

    async def refused(self, stream: bool = False, **fields: Any) -> LimitReached:
        """How a request is refused, of which nothing is stored then."""
        admission = self.admission(stream, **fields)
        with pytest.raises(LimitReached) as caught:
            await self.broker.admit(admission)
        assert await self.broker.status(admission.job.id) is None
        return caught.value


async def end(broker: Broker, tokens: tuple[int, int] | None = (3, 5), status: Status = "done") -> None:
    """Claim the best job and settle it."""
    claimed = await claim(broker)
    usage = None if tokens is None else Usage(*tokens)
    entry = messages.encode(Entry(9, [Ended(status, usage=usage)]))
    settled = Settle(claimed.job.id, claimed.attempt, f"{claimed.attempt}-0", entry, status)
    assert (await exchange(broker, settles=[settled])).settles == ["ok"]


# -- jobs and streams at once -----------------------------------------------------------------------------------------


async def test_i1_a_job_holds_its_place_until_it_ends(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(max_jobs=2))
    await key.ask()
    await key.ask(stream=True)
    refused = await key.refused()
    assert (refused.code, refused.status, refused.retry_after_s) == ("rate_limit_exceeded", 429, 1)
    assert refused.message == "the limit of this key, jobs: 2, is reached"
    claimed = await claim(broker)
    await key.refused()  # it runs
    await append(broker, claimed.job.id, "1-1")
    await key.refused()  # it streams
    await broker.cancel(claimed.job.id, "disconnect")
    await key.refused()  # it is marked, and has not ended
    await exchange(
        broker, settles=[Settle(claimed.job.id, 1, "1-1", messages.encode(Entry(9, [Ended("cancelled")])), "cancelled")]
    )
    await key.ask()
    await key.refused()


async def test_i1_every_way_to_end_gives_the_place_back(make_broker: MakeBroker) -> None:
    broker = await make_broker(lease_s=0.05, max_deaths=1, queue_timeout_s=0.3)
    key = Key(broker, of_owner=Limits(max_jobs=1, max_streams=1))
    await key.ask(stream=True)
    await end(broker, None)
    await broker.cancel(await key.ask(stream=True), "delete")  # while it waits
    await broker.forget(await key.ask(stream=True))
    await key.ask(stream=True, pod="pod", grace_ms=0)
    [job_id] = [job_id for job_id in [await _only(broker, key)] if job_id]
    await broker.unwatch("pod", {job_id: None})  # its client left
    await key.ask(stream=True)  # and this one nobody ever takes

    async def has_timed_out() -> bool:
        return (await reap(broker)).timeouts == 1

    await eventually(has_timed_out)
    await key.ask(stream=True)
    await append(broker, (await claim(broker)).job.id, "1-1")  # and this one kills its worker

    async def is_taken_back() -> bool:
        return (await reap(broker)).leases == 1

    await eventually(is_taken_back)
    assert await key.ask(stream=True)


async def _only(broker: Broker, key: Key) -> str:
    """The job that waits, found by its claim and handed back."""
    claimed = await claim(broker)
    await broker.release("r", claimed.job.id, claimed.attempt, f"{claimed.attempt}-0")
    return claimed.job.id


async def test_i1_a_job_that_is_handed_back_keeps_its_one_place(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(max_jobs=2))
    await key.ask()
    await _only(broker, key)
    await key.ask()
    await key.refused()


async def test_i1_a_job_that_was_refused_or_known_takes_no_place(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(max_jobs=2, requests_per_minute=2, tokens_per_minute=DAY, tokens_per_day=DAY))
    for _ in range(5):
        with pytest.raises(NoCapacity):
            await key.ask(model="nobody serves it")
        with pytest.raises(QueueFull):
            await key.ask(share=Share(max_waiting_jobs=0))
    first = key.admission()
    assert (await broker.admit(first)).is_new
    for _ in range(5):
        assert not (await broker.admit(first)).is_new
    await key.ask()
    await key.refused()


async def test_streams_are_counted_apart_from_other_jobs(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(max_streams=1))
    await key.ask(stream=True)
    assert "streams: 1" in (await key.refused(stream=True)).message
    await key.ask()
    await key.ask()


async def test_a_key_and_its_owner_are_counted_apart(broker: Broker) -> None:
    first = Key(broker, "k1", of_key=Limits(max_jobs=2), of_owner=Limits(max_jobs=3))
    second = Key(broker, "k2", of_key=Limits(max_jobs=2), of_owner=Limits(max_jobs=3))
    await first.ask()
    await first.ask()
    assert "of this key" in (await first.refused()).message
    await second.ask()
    assert "of this owner" in (await second.refused()).message
    await Key(broker, "k3", "bob", Limits(max_jobs=1), Limits(max_jobs=1)).ask()


async def test_a_place_whose_job_is_gone_without_an_end_is_found_out(make_broker: MakeBroker) -> None:
    broker = await make_broker(queue_timeout_s=0.01, max_run_s=0.01, log_ttl_s=0.05)
    key = Key(broker, of_key=Limits(max_jobs=1))
    await key.ask()

    async def is_free() -> bool:
        try:
            return bool(await key.ask())
        except LimitReached:
            return False

    await eventually(is_free)  # nobody has reaped: the job's own keys have run out


# -- requests and tokens ----------------------------------------------------------------------------------------------


async def test_requests_per_minute_are_a_bucket_that_fills_up_again(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(requests_per_minute=3))
    standings = [await key.standing() for _ in range(3)]
    assert [standing.requests and standing.requests[:2] for standing in standings] == [(3, 2), (3, 1), (3, 0)]
    assert standings[0].tokens is None
    last = standings[-1].requests
    assert last and 55_000 < last.reset_ms <= 60_000
    refused = await key.refused()
    assert refused.message == "the limit of this key, requests per minute: 3, is reached"
    assert 18 <= (refused.retry_after_s or 0) <= 20
    assert refused.standing.requests and refused.standing.requests[:2] == (3, 0)
    quick = Key(broker, "k2", of_key=Limits(requests_per_minute=6000))
    for _ in range(3):
        await quick.ask()


async def test_a_bucket_refills_by_the_servers_clock(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(requests_per_minute=600))
    for _ in range(600):
        await broker.admit(key.admission())

    async def is_admitted() -> bool:
        try:
            return bool(await key.ask())
        except LimitReached as error:
            assert error.retry_after_s == 1
            return False

    await eventually(is_admitted)


async def test_i1_tokens_are_reserved_at_admission_and_corrected_at_the_end(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(tokens_per_minute=100, tokens_per_day=DAY))
    assert (await key.standing(cost_tokens=60)).tokens
    refused = await key.refused(cost_tokens=60)
    assert "tokens per minute: 100" in refused.message and 10 <= (refused.retry_after_s or 0) <= 12
    await end(broker, (3, 5))  # 8 were used
    standing = await key.standing(cost_tokens=60)
    assert standing.tokens and standing.tokens.limit == 100 and 31 <= standing.tokens.left <= 34
    await end(broker, (50, 200))  # more than was thought
    standing = (await key.refused(cost_tokens=1)).standing
    assert standing.tokens and standing.tokens.left == 0 and standing.tokens.reset_ms > 120_000


async def test_i1_a_cut_stream_counts_what_was_generated(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(tokens_per_minute=100, tokens_per_day=DAY))
    await key.ask(cost_tokens=90)
    await end(broker, (4, 36), "cancelled")
    standing = await key.standing(cost_tokens=1)
    assert standing.tokens and 58 <= standing.tokens.left <= 61


async def test_i1_a_job_that_lost_its_worker_counts_its_steps(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(tokens_per_minute=100))
    job_id = await key.ask(cost_tokens=90, prompt_tokens=10)
    claimed = await claim(broker)
    for n in range(1, 22):
        assert await append(broker, job_id, f"1-{n}") == "ok"
    await broker.release("r", job_id, claimed.attempt, "1-21")
    assert await broker.cancel(job_id, "delete") == "waiting"
    standing = await key.standing(cost_tokens=1)
    assert standing.tokens and 68 <= standing.tokens.left <= 72


async def test_what_was_never_taken_costs_no_tokens(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(tokens_per_minute=100, tokens_per_day=100))
    for _ in range(3):
        await broker.cancel(await key.ask(cost_tokens=100), "delete")
    await key.ask(cost_tokens=99)


async def test_a_request_larger_than_the_bucket_is_let_in_when_that_is_whole_and_leaves_a_debt(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(tokens_per_minute=100))
    await key.ask(cost_tokens=1000)
    refused = await key.refused(cost_tokens=1)
    assert 500 <= (refused.retry_after_s or 0) <= 541


async def test_tokens_per_day_end_at_midnight(broker: Broker) -> None:
    key = Key(broker, of_owner=Limits(tokens_per_day=100))
    await key.ask(cost_tokens=100)
    refused = await key.refused(cost_tokens=1)
    assert "of this owner, tokens per day: 100" in refused.message and 1 <= (refused.retry_after_s or 0) <= 86_400
    assert refused.standing == Standing()
    await end(broker, (3, 5))
    await key.ask(cost_tokens=92)
    await key.refused(cost_tokens=1)


async def test_the_tighter_limit_is_told(broker: Broker) -> None:
    key = Key(broker, of_key=Limits(requests_per_minute=10), of_owner=Limits(requests_per_minute=5))
    standing = await key.standing()
    assert standing.requests and standing.requests[:2] == (5, 4)


async def test_shed_batch_jobs_give_back_what_they_had(make_broker: MakeBroker) -> None:
    broker = await make_broker(max_waiting_jobs=2)
    key = Key(broker, of_key=Limits(tokens_per_minute=100))
    await key.ask(band="batch", cost_tokens=40)
    await Key(broker, "k2", "bob", Limits(max_jobs=5)).ask(band="interactive")
    standing = await key.standing(band="interactive", cost_tokens=30)
    assert standing.tokens and 69 <= standing.tokens.left <= 71


# -- nobody else pays -------------------------------------------------------------------------------------------------


async def test_without_limits_nothing_is_counted(broker: Broker) -> None:
    admitted = await broker.admit(an_admission())
    assert admitted.standing == Standing()
