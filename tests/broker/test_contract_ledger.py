"""The contract of what the broker keeps beside jobs."""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec import structs

from headrace.broker.api_keys import KeySettings, StoredKey
from headrace.broker.limits import Limits
from headrace.broker.protocol import Broker

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
