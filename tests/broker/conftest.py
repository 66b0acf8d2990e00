"""Both brokers, empty and open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from headrace.broker.memory import MemoryBroker
from headrace.broker.protocol import Broker
from headrace.broker.settings import QueueSettings, RedisSettings
from headrace.broker.tail import Tail
from tests.broker.steps import Ears, MakeBroker, admit, claim, serve, settle
from tests.broker.tailing import MakeTail, Tailing
from tests.faults import FaultyBroker
from tests.support import eventually
from tests.users import Server, by_user


@pytest.fixture(params=["redis", "memory"])
def server(request: pytest.FixtureRequest) -> Server | None:
    """An empty server; None is for the broker in memory."""
    if request.param == "memory":
        return None
    request.getfixturevalue("redis_client")
    return cast(Server, request.getfixturevalue("redis_server"))


@pytest.fixture
async def make_broker(server: Server | None) -> AsyncIterator[MakeBroker]:
    """Open a broker whose queue settings are the defaults but for what is given; model `m` is served on it."""
    opened: list[Broker] = []

    async def make(shards: int = 1, **queue: float) -> Broker:
        settings = QueueSettings(**queue)  # type: ignore[arg-type]  # the tests know which are whole numbers
        broker: Broker = MemoryBroker(settings, shards)
        if server is not None:
            broker = by_user(server, RedisSettings(shards=shards), settings)
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


@pytest.fixture
async def make_tail(make_broker: MakeBroker) -> AsyncIterator[MakeTail]:
    """A tail that has heard that its subscription stands."""
    tails: list[Tail] = []

    async def make(lease_s: float = 10.0) -> Tailing:
        faults = FaultyBroker(broker := await make_broker(reader_lease_s=lease_s))
        tail = Tail(faults.broker, "pod", lease_s)
        probe = await admit(broker)
        await tail.start()
        tails.append(tail)
        # the first connection calls for a look into every log, so it is over when a silent reader is behind
        reader = tail.open(probe, "0-1")
        await eventually(lambda: reader.is_behind)
        tail.close_reader(reader, None)
        await eventually(lambda: "unwatch" in faults.calls)
        await claim(broker)
        await settle(broker, probe, 1, "1-0")
        faults.calls.clear()
        return Tailing(broker, faults, tail)

    yield make
    for tail in tails:
        await tail.close()


@pytest.fixture
async def tailing(make_tail: MakeTail) -> Tailing:
    return await make_tail()
