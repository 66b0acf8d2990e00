"""Both brokers, empty and open."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.broker.memory import MemoryBroker
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import Ears, MakeBroker, serve


@pytest.fixture(params=["redis", "memory"])
def redis_url(request: pytest.FixtureRequest) -> str | None:
    """Where the empty server is; None is for the broker in memory."""
    if request.param == "memory":
        return None
    request.getfixturevalue("redis_client")
    return str(request.getfixturevalue("redis_server").url)


@pytest.fixture
async def make_broker(redis_url: str | None) -> AsyncIterator[MakeBroker]:
    """Open a broker whose queue settings are the defaults but for what is given; model `m` is served on it."""
    opened: list[Broker] = []

    async def make(shards: int = 1, **queue: float) -> Broker:
        settings = QueueSettings(**queue)  # type: ignore[arg-type]  # the tests know which are whole numbers
        broker: Broker = MemoryBroker(settings, shards)
        if redis_url is not None:
            broker = RedisBroker(redis_url, RedisSettings(shards=shards), settings)
        await broker.open()
        opened.append(broker)
        await serve(broker)
        return broker

    yield make
    for broker in opened:
        await broker.close()


@pytest.fixture
async def broker(make_broker: MakeBroker) -> Broker:
    return await make_broker()


@pytest.fixture
async def ears(make_broker: MakeBroker) -> AsyncIterator[Ears]:
    ears = Ears()
    yield ears
    for listener in ears.listeners:
        await listener.close()
