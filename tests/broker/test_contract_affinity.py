"""The promise of `protocol.Broker`, on both brokers: prompts meet the replica that holds their beginning."""

from __future__ import annotations

from headrace.broker.affinity import MAX_PASSED, WINDOW
from headrace.broker.prefixes import LENGTHS, anchors
from headrace.broker.protocol import Asking, Broker, Share
from tests.broker.steps import Ears, admit, claim, claim_ids
from tests.support import a_text_job, eventually

A, B = "a" * 20_000, "b" * 20_000
SLOW = Asking(bytes_per_s=20_000)
"""A replica that needs a second for `A`."""


def prefix_of(text: str) -> bytes:
    return anchors(a_text_job(text))


async def ask(broker: Broker, text: str, **fields: object) -> str:
    return await admit(broker, prefix=prefix_of(text), **fields)


async def serve_once(broker: Broker, replica: str, text: str) -> None:
    """From now on the replica is there and holds this prompt."""
    await broker.present("replicas", replica, "m", {"state": "ready"})
    await ask(broker, text)
    await claim(broker, replica)


async def claimed_by(broker: Broker, replica: str, count: int = 1, asking: Asking | None = None) -> list[str]:
    return [found.job.id for found in await broker.claim(0, replica, "m", count, asking or Asking())]


async def test_a_replica_gets_the_job_whose_prefix_it_holds(broker: Broker) -> None:
    await serve_once(broker, "ra", A)
    await serve_once(broker, "rb", B)
    first, second = await ask(broker, B + "1"), await ask(broker, A + "2")
    assert await claimed_by(broker, "ra") == [second]
    assert await claimed_by(broker, "ra") == [first]  # there is no other work


async def test_it_gets_the_one_that_saves_most(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    short, long = await ask(broker, A[:5000] + B), await ask(broker, A + "1")
    assert await claimed_by(broker, "r", 2) == [long, short]


async def test_a_job_that_nobody_holds_goes_before_one_that_another_holds(broker: Broker) -> None:
    await serve_once(broker, "ra", A)
    held, fresh = await ask(broker, A + "1"), await ask(broker, B)
    assert await claimed_by(broker, "r") == [fresh]
    assert await claimed_by(broker, "r") == [held]


async def test_a_replica_that_is_gone_holds_nothing(broker: Broker) -> None:
    await serve_once(broker, "ra", A)
    await broker.absent("replicas", "ra", "m")
    held, _ = await ask(broker, A + "1"), await ask(broker, B)
    assert await claimed_by(broker, "r") == [held]


async def test_prompts_without_a_prefix_are_in_order(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    jobs = [await admit(broker) for _ in range(5)]
    assert await claim_ids(broker, 5) == jobs


async def test_what_a_replica_has_dropped_it_holds_no_more(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    first, second = await admit(broker), await ask(broker, A + "1")
    assert await claimed_by(broker, "r", 1, Asking(dropped=prefix_of(A))) == [first]
    assert await claimed_by(broker, "r") == [second]


async def test_a_claim_says_the_prefix(broker: Broker) -> None:
    await ask(broker, A)
    assert (await claim(broker)).prefix == prefix_of(A)
    await admit(broker)
    assert (await claim(broker)).prefix == b""


async def test_a_job_is_overtaken_eight_times_and_no_more(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    patient = await admit(broker)
    warm = [await ask(broker, f"{A}{number}") for number in range(MAX_PASSED + 4)]
    assert await claim_ids(broker, MAX_PASSED + 4) == [*warm[:MAX_PASSED], patient, *warm[MAX_PASSED : MAX_PASSED + 3]]


async def test_only_the_first_jobs_are_looked_at(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    cold = [await admit(broker) for _ in range(WINDOW)]
    await ask(broker, A + "1")
    assert await claim_ids(broker, 1) == cold[:1]


async def test_bands_go_before_prefixes(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    warm, urgent = await ask(broker, A + "1"), await admit(broker, band="interactive")
    assert await claim_ids(broker, 2) == [urgent, warm]


async def test_owners_take_turns_as_if_nobody_had_overtaken(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    many = [await admit(broker, owner="many", cost_tokens=100) for _ in range(4)]
    many += [await ask(broker, A + "1", owner="many", cost_tokens=100)]
    few = [await admit(broker, owner="few", cost_tokens=100) for _ in range(2)]
    assert await claim_ids(broker, 7) == [many[4], few[0], many[0], few[1], *many[1:4]]


async def test_an_owner_is_overtaken_within_one_quantum_only(broker: Broker) -> None:
    await serve_once(broker, "r", A)
    first = [await admit(broker, owner="a", cost_tokens=100) for _ in range(2)]
    await admit(broker, owner="b", cost_tokens=101)
    warm = await ask(broker, A + "1", owner="c", cost_tokens=1, share=Share(weight=0.1))
    far = await ask(broker, A + "2", owner="b", cost_tokens=100)  # b's first may be taken now, so this one, too
    claimed = await claim_ids(broker, 5)
    assert claimed[:2] == [far, warm] or claimed[:2] == [warm, far]
    assert claimed[2] == first[0]


async def test_a_job_wakes_the_idle_replica_that_holds_its_prefix(broker: Broker, ears: Ears) -> None:
    woken = {name: await ears.replica(broker, name) for name in ("r0", "r1", "r2")}
    await serve_once(broker, "r1", A)
    for name in woken:
        assert await claimed_by(broker, name) == []
    await ask(broker, A + "1")
    await eventually(lambda: woken["r1"])
    assert not woken["r0"] and not woken["r2"]
    await ask(broker, A + "2")  # its replica is awake already
    await eventually(lambda: woken["r0"])


async def test_a_job_is_left_to_the_replica_that_holds_it_for_a_while(broker: Broker) -> None:
    await serve_once(broker, "ra", A)
    held = await ask(broker, A + "1")
    left = await broker.claim(0, "r", "m", 1, SLOW)
    saved_ms = max(length for length in LENGTHS if length <= len(A)) * 1000 // SLOW.bytes_per_s
    assert not left and left.again_ms is not None and saved_ms - 500 < left.again_ms <= min(saved_ms, 1000)
    [claimed] = await broker.claim(0, "ra", "m", 1, SLOW)
    assert claimed.job.id == held


async def test_a_job_is_left_no_longer_than_that_saves(broker: Broker) -> None:
    await serve_once(broker, "ra", A)
    held = await ask(broker, A + "1")
    fast = Asking(bytes_per_s=200_000)
    taken: list[str] = []

    async def is_taken() -> bool:
        taken.extend(await claimed_by(broker, "r", 1, fast))
        return bool(taken)

    await eventually(is_taken, 0.3)
    assert taken == [held]


async def test_enough_tokens_are_enough(broker: Broker) -> None:
    for _ in range(5):
        await admit(broker, prompt_tokens=100)
    assert len(await claimed_by(broker, "r", 5, Asking(enough_tokens=150))) == 2
    assert len(await claimed_by(broker, "r", 5, Asking(enough_tokens=1))) == 1
    assert len(await claimed_by(broker, "r", 5, Asking(enough_tokens=1000))) == 2


async def test_who_has_enough_is_not_idle(broker: Broker, ears: Ears) -> None:
    full, idle = await ears.replica(broker, "full"), await ears.replica(broker, "idle")
    await admit(broker, prompt_tokens=100)
    await claimed_by(broker, "full", 5, Asking(enough_tokens=100))
    await claimed_by(broker, "idle", 5)
    await admit(broker)
    await eventually(lambda: idle)
    assert not full


async def test_a_replica_may_ask_for_several_models(broker: Broker) -> None:
    await broker.present("cluster", "test", "n", {})
    jobs = [await admit(broker, model=name) for name in ("n", "m", "n")]
    urgent = await admit(broker, model="n", band="interactive")
    claims = await broker.claim(0, "r", ["m", "n"], 4)
    assert [found.job.id for found in claims] == [urgent, jobs[1], jobs[0], jobs[2]]
