"""The log's reader on a real server: what a cut connection costs, and that readers need none of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis

from headrace.broker.embedded import EmbeddedServer
from headrace.broker.protocol import Append, Hint
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from headrace.broker.tail import Tail
from tests.broker.steps import STEP, admit, claim, exchange, serve
from tests.support import eventually


@pytest.fixture
async def broker(redis_server: EmbeddedServer, redis_client: redis.Redis) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(redis_server.url, RedisSettings(pool_size=4), QueueSettings())
    await broker.open()
    await serve(broker)
    yield broker
    await broker.close()


@pytest.fixture
async def tail(broker: RedisBroker) -> AsyncIterator[Tail]:
    tail = Tail(broker, "pod", 10.0)
    await tail.start()
    yield tail
    await tail.close()


def subscribers(client: redis.Redis) -> list[str]:
    return [each["id"] for each in client.client_list() if int(each["ssub"])]


async def test_a_reader_survives_the_loss_of_the_subscription(
    broker: RedisBroker, tail: Tail, redis_client: redis.Redis
) -> None:
    job_id = await admit(broker, pod="pod")
    await claim(broker)
    reader = tail.open(job_id, "1-0")
    await eventually(lambda: len(subscribers(redis_client)) == 1)
    [former] = subscribers(redis_client)
    redis_client.client_kill_filter(_id=former)
    await exchange(broker, [Hint("pod", [])], [Append(job_id, "1-1", STEP)])  # nobody hears of it
    await eventually(lambda: subscribers(redis_client) not in ([], [former]), 1.0)
    async with asyncio.timeout(1.0):
        assert [entry.id for entry in await reader.read()] == ["1-1"]
    await exchange(broker, appends=[Append(job_id, "1-2", STEP)])
    await exchange(broker, [Hint("pod", [Append(job_id, "1-2", STEP)])])
    async with asyncio.timeout(0.3):
        assert [entry.id for entry in await reader.read()] == ["1-2"]


async def test_a_message_that_is_no_hint_does_not_deafen_the_pod(
    broker: RedisBroker, tail: Tail, redis_client: redis.Redis
) -> None:
    job_id = await admit(broker, pod="pod")
    await claim(broker)
    reader = tail.open(job_id, "1-0")
    await eventually(lambda: len(subscribers(redis_client)) == 1)
    redis_client.execute_command("SPUBLISH", "hr:{0000}:pod:pod", b"\x00what")  # type: ignore[no-untyped-call]
    await exchange(broker, appends=[Append(job_id, "1-1", STEP)])
    await exchange(broker, [Hint("pod", [Append(job_id, "1-1", STEP)])])
    async with asyncio.timeout(0.3):
        assert [entry.id for entry in await reader.read()] == ["1-1"]
    assert len(subscribers(redis_client)) == 1


async def test_a_thousand_readers_use_no_more_connections_than_one(
    broker: RedisBroker, tail: Tail, redis_client: redis.Redis
) -> None:
    job_ids = [await admit(broker, pod="pod") for _ in range(100)]
    await broker.claim(0, "r", "m", 100)
    before = len(redis_client.client_list())
    attached = await asyncio.gather(*(tail.attach(job_id) for job_id in job_ids for _ in range(10)))
    await exchange(broker, appends=[Append(job_id, "1-1", STEP) for job_id in job_ids])

    async def ids(number: int) -> list[str]:
        found: list[str] = []
        while len(found) < 3:
            found += [entry.id for entry in await attached[number].read()]
        return found

    async with asyncio.timeout(10):
        assert await asyncio.gather(*map(ids, range(1000))) == [["0-1", "1-0", "1-1"]] * 1000
    assert tail.readers == 1000
    assert len(redis_client.client_list()) <= before + 4
    for reader in attached:
        tail.close_reader(reader, None)
    await eventually(lambda: not tail._leaving)
