"""Any mix of prompts, owners and replicas: both brokers choose alike, none is overtaken too often, owners stay even."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.affinity import MAX_PASSED, WINDOW, Candidate, choose, left_ms, turns
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.prefixes import ANCHOR_BYTES, LENGTHS, anchors, split
from headrace.broker.protocol import Asking, Broker, Share
from headrace.broker.settings import QueueSettings
from tests.broker.twins import Twins, both_brokers
from tests.support import a_text_job, an_admission

QUEUE = QueueSettings(lease_s=600.0)
REPLICAS = ("r0", "r1", "r2")
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 0.5}


@pytest.fixture
async def brokers(redis_server: EmbeddedServer, redis_client: redis.Redis) -> AsyncIterator[list[Broker]]:
    async with both_brokers(redis_server.url, QUEUE) as both:
        for broker in both:
            for replica in REPLICAS:
                await broker.present("replicas", replica, "m", {"state": "ready"})
        yield both


class Workload(Twins):
    """Random steps, each done to both brokers, whose answers must be the same."""

    def __init__(self, seed: int, brokers: list[Broker]) -> None:
        super().__init__(seed, brokers)
        self.served: dict[str, set[bytes]] = defaultdict(set)

    def prefix(self) -> bytes:
        """Of one of three families that share beginnings of some lengths; one in four has none."""
        if self._random.random() < 0.25:
            return b""
        family, shared = self._random.choice("xyz"), self._random.randint(1, 8)
        own = self._random.randint(0, 3)
        names = [f"{family}{i}" for i in range(shared)] + [f"{self._random.random()}" for _ in range(own)]
        return b"".join(name.encode().ljust(ANCHOR_BYTES)[:ANCHOR_BYTES] for name in names)

    async def admit(self, owner: str, cost: int | None = None) -> str:
        cost = cost or self._random.randint(1, 999)
        queueing: dict[str, Any] = {"cost_tokens": cost, "prompt_tokens": cost, "share": Share(weight=WEIGHTS[owner])}
        admission = an_admission(owner=owner, prefix=self.prefix(), **queueing)

        async def is_new(broker: Broker) -> bool:
            return (await broker.admit(admission)).is_new

        assert await self.both(is_new)
        return admission.job.id

    async def claim(self) -> list[str]:
        replica, count = self._random.choice(REPLICAS), self._random.randint(1, 3)
        dropped = self._random.sample(sorted(self.served[replica]), min(2, len(self.served[replica])))
        self.served[replica] -= set(dropped)
        asking = Asking(self._random.choice([None, 500]), 0, b"".join(dropped))

        async def claims(broker: Broker) -> list[tuple[str, int, bytes]]:
            found = await broker.claim(0, replica, "m", count, asking)
            return [(claim.job.id, claim.fresh_tokens, claim.prefix) for claim in found]

        claimed = await self.both(claims)
        for _, _, prefix in claimed:
            self.served[replica] |= set(split(prefix))
        return [job_id for job_id, _, _ in claimed]


@pytest.mark.parametrize("seed", range(4))
async def test_both_brokers_choose_alike(brokers: list[Broker], seed: int) -> None:
    workload, chance = Workload(seed, brokers), random.Random(seed)
    for _ in range(200):
        if chance.random() < 0.65:
            await workload.admit(chance.choice("abc"))
        else:
            await workload.claim()


@pytest.mark.parametrize("seed", range(2))
async def test_no_job_is_overtaken_more_often_than_the_bound(brokers: list[Broker], seed: int) -> None:
    workload, waiting, overtaken = Workload(seed, brokers), list[str](), Counter[str]()
    for turn in range(400):
        if turn < 30 or turn % 2:
            waiting.append(await workload.admit("a"))
            continue
        for job_id in await workload.claim():
            place = waiting.index(job_id)
            overtaken.update(waiting[:place])
            del waiting[place]
    assert max(overtaken.values()) == MAX_PASSED  # it comes to that, and to no more


async def test_owners_that_wait_all_the_time_get_their_shares(brokers: list[Broker]) -> None:
    """Jobs of one size: each owner has got its weighted share, but for two jobs of its own and two of each other's."""
    workload, owner_of, got = Workload(7, brokers), dict[str, str](), Counter[str]()
    for _ in range(100):
        for owner in WEIGHTS:
            owner_of[await workload.admit(owner, 100)] = owner
    for _ in range(25):
        for job_id in await workload.claim():
            got[owner_of[job_id]] += 100
        for one, other in (("a", "b"), ("b", "c"), ("a", "c")):
            unfair = abs(got[one] / WEIGHTS[one] - got[other] / WEIGHTS[other])
            assert unfair <= 2 * (100 / WEIGHTS[one] + 100 / WEIGHTS[other])


candidates = st.lists(
    st.builds(
        Candidate,
        owner=st.sampled_from("abc"),
        tag=st.floats(0, 1000),
        charge=st.floats(1, 500),
        passed=st.integers(0, MAX_PASSED),
        here=st.sampled_from([0, *LENGTHS]),
        there=st.sampled_from([0, *LENGTHS]),
        left_ms=st.sampled_from([0, 0, 5]),
    ),
    min_size=1,
    max_size=WINDOW,
).map(lambda window: sorted(window, key=lambda job: job.tag))


@given(candidates)
def test_the_chosen_one_is_of_equal_rank_and_overtakes_nobody_that_has_waited_enough(window: list[Candidate]) -> None:
    chosen = choose(window)
    if chosen is None:
        assert window[0].left_ms
        return
    job = window[chosen]
    assert not job.left_ms
    assert all(other.passed < MAX_PASSED for other in window[:chosen])
    first = next(other.tag for other in window if other.owner == job.owner)
    assert first - window[0].tag <= window[0].charge


@given(candidates, st.data())
def test_an_owner_keeps_its_turns_and_the_order_of_its_other_jobs(window: list[Candidate], data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(window) - 1))
    new = dict(turns(window, chosen))
    own = [index for index in range(chosen + 1) if window[index].owner == window[chosen].owner]
    assert sorted(new.values()) == [window[index].tag for index in own]
    assert new[chosen] == window[own[0]].tag
    others = [new[index] for index in own[:-1]]
    assert others == sorted(others)


@given(st.sampled_from([0, *LENGTHS]), st.sampled_from([0, *LENGTHS]), st.integers(0, 5000), st.integers(0, 10**6))
def test_a_job_waits_for_another_replica_no_longer_than_that_saves(
    here: int, there: int, waited_ms: int, bytes_per_s: int
) -> None:
    left = left_ms(here, there, 0, waited_ms, bytes_per_s)
    if left:
        assert there > 2 * here
        assert (waited_ms + left) * bytes_per_s <= 1000 * (there - here)
    assert left_ms(here, there, MAX_PASSED, waited_ms, bytes_per_s) == 0


@settings(max_examples=50)
@given(st.text(min_size=0, max_size=3000), st.text(max_size=2000), st.text(max_size=2000))
def test_prompts_share_the_anchors_of_what_they_share(common: str, one: str, other: str) -> None:
    first, second = (split(anchors(a_text_job(common + end))) for end in (one, other))
    shared = sum(length <= len(common.encode()) for length in LENGTHS)
    assert first[:shared] == second[:shared]
    assert len(first) == sum(length <= len((common + one).encode()) for length in LENGTHS)
