"""The contract of what the broker keeps beside jobs."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from msgspec import structs

from headrace.broker import keys, messages
from headrace.broker.api_keys import KeySettings, StoredKey
from headrace.broker.ledger import DAY_MS, AuditEntry
from headrace.broker.limits import Limits
from headrace.broker.messages import Ended, Entry, Usage
from headrace.broker.protocol import Broker, Settle
from tests.broker.steps import MakeBroker, admit, unknown_id

FULL = KeySettings(
    "älice & co",
    "a" * 64,
    "batch",
    2.5,
    3,
    scopes=("use", "admin"),
    models=["m"],
    routes=["/v1"],
    expires=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
    limits=Limits(requests_per_minute=5, max_streams=1),
    owner_limits=Limits(tokens_per_day=10**9),
)


async def test_a_key_comes_back_as_it_was_put(broker: Broker) -> None:
    assert (await broker.ledger.version(), await broker.ledger.all_keys()) == (0, [])
    later, earlier = StoredKey(FULL, 2000), StoredKey(KeySettings("bob", "b" * 64), 1000)
    for each in (later, earlier):
        await broker.ledger.put_key(each)
    assert await broker.ledger.key("a" * 64) == later
    assert await broker.ledger.key("c" * 64) is None and await broker.ledger.key("version") is None
    assert await broker.ledger.all_keys() == [earlier, later]


async def test_each_change_has_another_version(broker: Broker) -> None:
    seen = {await broker.ledger.version()}
    for revoked_ms in (None, 5, 6):
        await broker.ledger.put_key(structs.replace(StoredKey(FULL, 2000), revoked_ms=revoked_ms))
        seen.add(await broker.ledger.version())
    assert len(seen) == 4
    [only] = await broker.ledger.all_keys()
    assert only.state(0.0) == "revoked"


async def test_a_job_is_there_for_its_owner_only(broker: Broker) -> None:
    job = await admit(broker, owner="alice")
    assert await broker.status(job, "bob") is None and await broker.status(unknown_id(), "bob") is None
    found = await broker.status(job, "alice")
    assert found is not None and found == await broker.status(job)


async def test_notes_come_newest_first(broker: Broker) -> None:
    assert await broker.ledger.notes(5) == []
    for number in range(4):
        await broker.ledger.note(AuditEntry("älice", "did", str(number), "and why"))
    found = await broker.ledger.notes(3)
    assert [noted.entry.subject for noted in found] == ["3", "2", "1"]
    assert found[0].entry == AuditEntry("älice", "did", "3", "and why")
    assert abs(found[0].at_ms - time.time() * 1000) < 60_000


async def use(broker: Broker, owner: str, prompt: int, completion: int, shard: int = 0) -> None:
    """A job that ends, having used so many tokens."""
    await admit(broker, owner=owner, job_id=keys.at_shard(keys.new_job_id(1), shard))
    [claimed] = await broker.claim(shard, "r", "m", 1)
    entry = messages.encode(Entry(9, [Ended("done", usage=Usage(prompt, completion))]))
    lane = broker.lane(shard)
    await lane.exchange([], [], [Settle(claimed.job.id, 1, "1-0", entry, "done")])
    await lane.close()


async def test_what_owners_use_is_counted_by_day_and_model_over_all_shards(make_broker: MakeBroker) -> None:
    broker = await make_broker(shards=3)
    today = time.time_ns() // 1_000_000 // DAY_MS
    for shard in range(3):
        await use(broker, "alice", 10, 5, shard)
    await use(broker, "b ö b", 1, 0)
    await broker.cancel(await admit(broker, owner="b ö b"), "delete")  # it was never begun
    days = (today, time.time_ns() // 1_000_000 // DAY_MS)  # it may be midnight
    found = [used for day in sorted(set(days)) for used in await broker.ledger.usage(day)]
    assert [used[1:] for used in found] == [("alice", "m", 3, 30, 15), ("b ö b", "m", 2, 1, 0)]
    assert await broker.ledger.usage_of("alice", ["x", "m"], found[0].day) == found[:1]
    assert await broker.ledger.usage_of("alice", ["x"], found[0].day) == []
    assert await broker.ledger.usage_of("alice", ["m"], found[0].day - 1) == []
    assert await broker.ledger.usage(1) == []
