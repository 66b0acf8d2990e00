"""The functions on a server: brought by who may, found by who may not, side by side for two versions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis import asyncio as aio

from headrace.broker import functions, scripts
from headrace.broker.errors import BrokerDown
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import serve
from tests.support import an_admission
from tests.users import Server


@pytest.fixture
async def server(redis_server: Server, redis_client: redis.Redis) -> AsyncIterator[Any]:
    """A client of a server without any function; they are there again afterwards."""
    redis_client.execute_command("FUNCTION FLUSH")  # type: ignore[no-untyped-call]
    async with aio.Redis.from_url(redis_server.root_url, protocol=2) as client:
        yield client
        await functions.bring(client)


@pytest.fixture
async def confined(server: Any, redis_server: Server) -> AsyncIterator[RedisBroker]:
    """A broker whose user may do anything but bring functions."""
    words = ["on", ">secret", "~*", "&*", "+@all", "-function"]
    await server.execute_command("ACL SETUSER", "confined", *words)
    broker = RedisBroker(redis_server.url_of("confined"), RedisSettings(), QueueSettings())
    yield broker
    await broker.close()
    await server.execute_command("ACL DELUSER", "confined")


async def test_who_may_not_bring_them_says_what_to_do_and_goes_on_when_it_was_done(
    server: Any, confined: RedisBroker
) -> None:
    with pytest.raises(BrokerDown, match="run `headrace redis-functions`"):
        await confined.open()
    with pytest.raises(BrokerDown, match="run `headrace redis-functions`"):
        await serve(confined)
    await functions.bring(server)
    await confined.open()
    await serve(confined)
    assert (await confined.admit(an_admission())).is_new


async def test_who_may_brings_them_back_without_being_asked(server: Any, redis_server: Server) -> None:
    broker = RedisBroker(redis_server.root_url, RedisSettings(), QueueSettings())
    await broker.open()
    await server.execute_command("FUNCTION FLUSH")
    await serve(broker)
    await broker.reap(0)
    await broker.close()


async def test_a_server_that_is_full_or_lacks_its_replica_has_them_all_the_same(server: Any) -> None:
    await functions.bring(server)
    for name, value, normal in (("maxmemory", 1, 0), ("min-replicas-to-write", 1, 0)):
        await server.config_set(name, value)
        try:
            await functions.bring(server)
        finally:
            await server.config_set(name, normal)


async def test_versions_stand_side_by_side_until_the_others_are_forgotten(server: Any) -> None:
    await functions.bring(server)
    other = scripts.library().replace(scripts.library_name(), "hr_0123456789ab")
    await server.execute_command("FUNCTION LOAD", other)
    foreign = "#!lua name=foreign\nredis.register_function('foreign', function() return 1 end)"
    await server.execute_command("FUNCTION LOAD", foreign)
    assert await functions.forget_others(server) == ["hr_0123456789ab"]
    assert await functions.forget_others(server) == []
    assert await server.execute_command("FCALL", "foreign", 0) == 1
    await server.execute_command("FUNCTION DELETE", "foreign")
    await functions.bring(server)


def test_a_library_is_named_after_what_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = scripts.library_name()
    assert scripts.library().startswith(f"#!lua name={name}\n")
    assert scripts.library().count("redis.register_function") == len(scripts.VERBS) + 1
    changed = scripts.source("tick") + "-- more"
    for cached in (scripts.library, scripts.library_name, scripts._content):
        cached.cache_clear()
    source = scripts.source
    monkeypatch.setattr(scripts, "source", lambda file: changed if file == "tick" else source(file))
    assert scripts.library_name() != name
    monkeypatch.undo()
    for cached in (scripts.library, scripts.library_name, scripts._content):
        cached.cache_clear()
    assert scripts.library_name() == name
