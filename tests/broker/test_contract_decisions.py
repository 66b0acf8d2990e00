"""The promise of `protocol.Broker`, on both brokers: what an autoscaler writes and reads."""

from __future__ import annotations

from typing import Literal

from headrace.broker.messages import ScaleDecision
from headrace.broker.protocol import MAX_DECISIONS, Broker
from tests.broker.steps import MakeBroker, admit, claim
from tests.support import eventually


def decision(at_ms: int, target: int, direction: Literal["up", "down", "hold"], reason: str) -> ScaleDecision:
    return ScaleDecision(at_ms, 1, target, direction, reason, waiting=7)


async def test_decisions_are_counted_and_those_that_say_something_new_are_kept(broker: Broker) -> None:
    told = [
        decision(1, 1, "hold", "steady"),
        decision(2, 1, "hold", "steady"),
        decision(3, 3, "up", "backlog"),
        decision(4, 3, "hold", "steady"),
        decision(5, 3, "hold", "steady"),
        decision(6, 2, "down", "lower"),
    ]
    for each in told:
        await broker.note_decision("m", each)
    assert [each.at_ms for each in await broker.decisions("m", 10)] == [6, 4, 3, 1]
    assert (await broker.decisions("m", 1))[0] == told[-1]
    assert await broker.decided("m") == {"hold:steady": 4, "up:backlog": 1, "down:lower": 1}
    assert (await broker.decisions("other", 10), await broker.decided("other")) == ([], {})


async def test_advice_that_stays_the_same_is_kept_once(broker: Broker) -> None:
    for at_ms in range(5):
        await broker.note_decision("m", ScaleDecision(at_ms, 1, 3, "up", "backlog", is_advice=True))
    assert [each.at_ms for each in await broker.decisions("m", 10)] == [0]


async def test_only_so_many_decisions_are_kept(broker: Broker) -> None:
    for number in range(MAX_DECISIONS + 5):
        await broker.note_decision("m", decision(number, number, "up", "backlog"))
    kept = await broker.decisions("m", 2 * MAX_DECISIONS)
    assert [each.at_ms for each in kept] == list(range(MAX_DECISIONS + 4, 4, -1))


async def test_arrivals_are_counted_whatever_becomes_of_them(broker: Broker) -> None:
    await broker.present("cluster", "c", "m", {})
    first = await admit(broker, prompt_tokens=10)
    await admit(broker, prompt_tokens=5)
    await broker.cancel(first, "client")
    await claim(broker)
    stats = await broker.stats("m")
    assert (stats.arrived_jobs, stats.arrived_tokens, stats.prompt_tokens) == (2, 15, 0)


async def test_a_job_that_is_known_does_not_arrive_again(broker: Broker) -> None:
    job = await admit(broker, prompt_tokens=10)
    await admit(broker, job_id=job, prompt_tokens=10)
    assert (await broker.stats("m")).arrived_jobs == 1


async def test_replicas_that_come_are_counted_once(make_broker: MakeBroker) -> None:
    broker = await make_broker(shards=2, lease_s=0.5)
    for replica in ("a", "b", "a", "a"):
        await broker.present("replicas", replica, "m", {"state": "starting"})
    await broker.present("cluster", "serve", "m", {})
    await broker.present("pods", "p", "", {"pid": 1})
    assert (await broker.stats("m")).replica_starts == 2
    await broker.absent("replicas", "b", "m")
    assert (await broker.stats("m")).replica_starts == 2

    async def has_lapsed() -> bool:
        return not await broker.listing("replicas")

    await eventually(has_lapsed)
    await broker.present("replicas", "a", "m", {"state": "ready"})
    assert (await broker.stats("m")).replica_starts == 3
