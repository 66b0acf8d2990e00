"""Keys that the broker keeps: made, used, expired and revoked while pods run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from headrace.api import exposure
from headrace.api.keyring import Keyring
from headrace.broker import api_keys
from headrace.broker.api_keys import KeySettings, StoredKey, digest
from headrace.broker.errors import BrokerDown, ConfigError, Unauthorized
from headrace.broker.memory import MemoryBroker
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import ApiSettings, Settings
from tests.api.conftest import Deploy
from tests.faults import FaultyBroker
from tests.support import eventually

TOKEN = api_keys.new_token()
WITHIN_S = 5.0


def stored(token: str = TOKEN, **fields: Any) -> StoredKey:
    return StoredKey(KeySettings("alice", digest(token), **fields), api_keys.now_ms())


def settings(host: str = "127.0.0.1", **fields: Any) -> Settings:
    return Settings(
        [ScriptedModel(name="m")], api=ApiSettings(host=host, insecure=fields.pop("insecure", False)), **fields
    )


async def test_a_key_is_known_and_revoked_on_all_pods_within_seconds(deploy: Deploy) -> None:
    up = await deploy(pods=2, workers=0)

    async def statuses(token: str = TOKEN) -> list[int]:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return [(await up.ask("GET", "/v1/models", pod, headers=headers)).status for pod in (0, 1)]

    async def are(*wanted: int) -> bool:
        return await statuses() == list(wanted)

    assert await statuses("") == [200, 200]  # no keys anywhere, and nobody else can reach it
    await up.broker.ledger.put_key(key := stored())

    async def is_closed() -> bool:
        return await statuses("") == [401, 401]

    await eventually(is_closed, WITHIN_S)
    assert await statuses() == [200, 200]
    await up.broker.ledger.put_key(structs.replace(key, revoked_ms=api_keys.now_ms()))
    await eventually(lambda: are(401, 401), 3 * WITHIN_S)
    assert await statuses("") == [401, 401]  # it does not open again


async def test_a_key_that_is_used_costs_no_round_trip_and_one_that_is_not_there_only_one() -> None:
    faults = FaultyBroker(broker := MemoryBroker(settings().queue))
    await broker.ledger.put_key(stored())
    asked: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(broker.ledger, name)

    ring = Keyring(settings(), Counting())
    await ring.refresh()
    for _ in range(5):
        assert (await ring.find(TOKEN)).owner == "alice"
        with pytest.raises(Unauthorized):
            await ring.find("nobody's")
    assert asked == ["version", "key", "key"] and not faults.calls


async def test_a_key_expires_by_itself() -> None:
    broker = MemoryBroker(settings().queue)
    ring = Keyring(settings(), broker.ledger)
    soon = datetime.now(UTC) + timedelta(seconds=0.2)
    await broker.ledger.put_key(stored(expires=soon))
    await ring.refresh()
    assert (await ring.find(TOKEN)).owner == "alice"

    async def is_refused() -> bool:
        try:
            await ring.find(TOKEN)
        except Unauthorized:
            return True
        return False

    await eventually(is_refused)


async def test_a_restriction_that_this_build_does_not_know_refuses_the_key() -> None:
    data = api_keys.encode(stored()).replace(b"\xa5owner", b"\xa5ownex")
    assert api_keys.decode(data) is None


@pytest.mark.parametrize(
    ("host", "fields", "owner"),
    [
        ("127.0.0.1", {}, "anonymous"),
        ("::1", {}, "anonymous"),
        ("127.8.8.8", {}, "anonymous"),
        ("0.0.0.0", {}, None),
        ("0.0.0.0", {"insecure": True}, "anonymous"),
        ("10.1.2.3", {}, None),
        ("127.0.0.1", {"keys": [KeySettings("bob", "0" * 64)]}, None),
        ("0.0.0.0", {"insecure": True, "keys": [KeySettings("bob", "0" * 64)]}, None),
    ],
)
async def test_who_everybody_is_without_keys(host: str, fields: dict[str, Any], owner: str | None) -> None:
    ring = Keyring(settings(host, **fields), MemoryBroker(settings().queue).ledger)
    await ring.refresh()
    if owner is None:
        with pytest.raises(Unauthorized):
            await ring.find("")
    else:
        key = await ring.find("")
        assert key.owner == owner
        assert ("admin" in key.scopes) == (host != "0.0.0.0")


async def test_before_the_broker_has_answered_nobody_is_taken_for_anybody() -> None:
    ring = Keyring(settings(), MemoryBroker(settings().queue).ledger)
    with pytest.raises(BrokerDown):
        await ring.find("")


async def test_an_address_that_others_reach_is_not_bound_without_keys() -> None:
    broker = MemoryBroker(settings().queue)
    for fine in (
        settings(),
        settings("0.0.0.0", insecure=True),
        settings("0.0.0.0", keys=[KeySettings("a", "0" * 64)]),
    ):
        await exposure.check(fine, broker)
    with pytest.raises(ConfigError, match=r"api.host: '0.0.0.0' .*headrace keys create.*--insecure"):
        await exposure.check(settings("0.0.0.0"), broker)
    await broker.ledger.put_key(stored())
    await exposure.check(settings("0.0.0.0"), broker)
