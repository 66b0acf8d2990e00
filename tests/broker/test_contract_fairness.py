"""The promise of `protocol.Broker`, on both brokers: who is next among the owners in one band."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from headrace.broker import messages
from headrace.broker.messages import Ended, Entry, Usage
from headrace.broker.protocol import Broker, Settle, Share
from tests.broker.steps import MakeBroker, admit, claim, claim_ids, exchange, settle
from tests.support import an_admission


async def admit_many(broker: Broker, owner: str, count: int, *, cost: int = 100, weight: float = 1.0) -> list[str]:
    share = Share(weight=weight)
    return [await admit(broker, owner=owner, cost_tokens=cost, share=share) for _ in range(count)]


async def settle_with_usage(broker: Broker, job_id: str, tokens: int) -> None:
    data = messages.encode(Entry(9, [Ended("done", None, Usage(0, tokens))]))
    [written] = (await exchange(broker, settles=[Settle(job_id, 1, "1-0", data, "done")])).settles
    assert written == "ok"


def owners(claimed: Iterable[str], **jobs: list[str]) -> list[str]:
    owner_of = {job_id: owner for owner, ids in jobs.items() for job_id in ids}
    return [owner_of[job_id] for job_id in claimed]


async def test_a_single_request_waits_for_at_most_one_job_of_an_owner_with_a_thousand(broker: Broker) -> None:
    await admit_many(broker, "many", 1000)
    for _ in range(3):
        await settle(broker, (await claim(broker)).job.id, 1, "1-0")
    single = await admit(broker, owner="single", cost_tokens=5000)
    assert single in await claim_ids(broker, 2)


async def test_owners_with_equal_weights_take_turns(broker: Broker) -> None:
    many, few = await admit_many(broker, "many", 9), await admit_many(broker, "few", 3)
    claimed = owners(await claim_ids(broker, 12), many=many, few=few)
    assert claimed == ["many", "few"] * 3 + ["many"] * 6


async def test_twice_the_weight_is_twice_as_many_tokens(broker: Broker) -> None:
    heavy = await admit_many(broker, "heavy", 60, weight=2.0)
    light = await admit_many(broker, "light", 60)
    assert Counter(owners(await claim_ids(broker, 30), heavy=heavy, light=light)) == {"heavy": 20, "light": 10}


async def test_owners_share_tokens_and_not_jobs(broker: Broker) -> None:
    long, short = await admit_many(broker, "long", 20, cost=300), await admit_many(broker, "short", 60)
    assert Counter(owners(await claim_ids(broker, 40), long=long, short=short)) == {"long": 10, "short": 30}


async def test_ties_between_owners_are_in_order_of_age(broker: Broker) -> None:
    firsts = [await admit(broker, owner=f"owner {number}") for number in range(20)]
    assert await claim_ids(broker, 20) == firsts


async def test_an_owner_that_was_idle_has_saved_nothing_up(broker: Broker) -> None:
    busy = await admit_many(broker, "busy", 20)
    await claim_ids(broker, 10)
    late = await admit_many(broker, "late", 10)
    claimed = owners(await claim_ids(broker, 10), busy=busy, late=late)
    assert Counter(claimed) == {"busy": 5, "late": 5}


async def test_bands_go_before_fairness(broker: Broker) -> None:
    urgent = [await admit(broker, owner="many", band="interactive") for _ in range(5)]
    other = await admit(broker, owner="other", band="default")
    assert await claim_ids(broker, 6) == [*urgent, other]


async def test_a_job_that_took_less_than_estimated_is_charged_for_what_it_took(broker: Broker) -> None:
    await admit_many(broker, "rival", 20)
    [modest] = await admit_many(broker, "modest", 1, cost=10_000)
    assert modest in await claim_ids(broker, 2)
    await settle_with_usage(broker, modest, 10)
    [again] = await admit_many(broker, "modest", 1)
    assert again in await claim_ids(broker, 2)


async def test_a_job_that_took_more_than_estimated_is_charged_for_what_it_took(broker: Broker) -> None:
    await admit_many(broker, "rival", 20)
    [greedy] = await admit_many(broker, "greedy", 1, cost=10)
    assert greedy in await claim_ids(broker, 2)
    await settle_with_usage(broker, greedy, 1000)
    [again] = await admit_many(broker, "greedy", 1)
    assert again not in await claim_ids(broker, 9)
    assert again in await claim_ids(broker, 2)


async def test_an_owner_saves_nothing_up_by_jobs_that_took_less_than_estimated(broker: Broker) -> None:
    rival = await admit_many(broker, "rival", 40)
    [cheap] = await admit_many(broker, "owner", 1, cost=500)
    [dear] = await admit_many(broker, "owner", 1, cost=10)
    claimed = await claim_ids(broker, 18)
    assert {cheap, dear} < set(claimed)
    await settle_with_usage(broker, cheap, 0)
    await settle_with_usage(broker, dear, 1010)
    [again] = await admit_many(broker, "owner", 1)
    assert await claim_ids(broker, 9) == [job_id for job_id in rival if job_id not in claimed][:9]
    assert again in await claim_ids(broker, 2)


async def test_what_was_never_claimed_costs_its_owner_nothing(broker: Broker) -> None:
    await admit_many(broker, "rival", 10)
    await claim(broker)
    for job_id in await admit_many(broker, "wavering", 50):
        await broker.cancel(job_id, "test")
    [serious] = await admit_many(broker, "wavering", 1)
    assert serious in await claim_ids(broker, 2)


async def test_the_jobs_of_one_owner_stay_in_order_whatever_earlier_ones_took(broker: Broker) -> None:
    await admit_many(broker, "rival", 30)
    running = await admit_many(broker, "owner", 5, cost=1000)
    waiting = await admit_many(broker, "owner", 3, cost=10)
    claimed: list[str] = []
    while not set(running) <= set(claimed):
        claimed += await claim_ids(broker, 1)
    for job_id in running:
        await settle_with_usage(broker, job_id, 0)
    await broker.cancel(waiting[1], "test")
    waiting += await admit_many(broker, "owner", 3, cost=10)
    rest = await claim_ids(broker, 99)
    own = [waiting[0], *waiting[2:]]
    assert [job_id for job_id in [*claimed, *rest] if job_id in own] == own


async def test_a_queue_that_was_empty_has_forgotten_who_had_what(broker: Broker) -> None:
    many = await admit_many(broker, "many", 10)
    assert await claim_ids(broker, 10) == many
    many, other = await admit_many(broker, "many", 1), await admit_many(broker, "other", 1)
    assert await claim_ids(broker, 2) == [*many, *other]


async def test_jobs_that_are_handed_back_keep_their_start_tags(broker: Broker) -> None:
    many, few = await admit_many(broker, "many", 4), await admit_many(broker, "few", 2)
    claimed = await claim_ids(broker, 6)
    for job_id in [*few, *many]:
        await broker.release("r", job_id, 1, "1-0")
    assert await claim_ids(broker, 6) == claimed


async def test_a_limit_that_no_model_can_reach_does_not_end_fairness(make_broker: MakeBroker) -> None:
    """Pods clamp what a job costs; even so the arithmetic must stay exact enough at large tags."""
    broker = await make_broker()
    await broker.admit(an_admission(owner="huge", cost_tokens=10**12, share=Share(weight=0.001)))
    await broker.admit(an_admission(owner="huge", cost_tokens=1))
    many, other = await admit_many(broker, "many", 9), await admit_many(broker, "other", 3)
    claimed = [job_id for job_id in await claim_ids(broker, 14) if job_id in [*many, *other]]
    assert owners(claimed, many=many, other=other) == ["many", "other"] * 3 + ["many"] * 6
