"""Both brokers side by side: whatever is done to them, their answers must be the same."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from headrace.broker.memory import MemoryBroker
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import serve


@contextlib.asynccontextmanager
async def both_brokers(url: str, queue: QueueSettings) -> AsyncIterator[list[Broker]]:
    both: list[Broker] = [RedisBroker(url, RedisSettings(), queue), MemoryBroker(queue)]
    for broker in both:
        await broker.open()
        await serve(broker)
    yield both
    for broker in both:
        await broker.close()


class Twins:
    """Random steps, each done to both brokers."""

    def __init__(self, seed: int, brokers: list[Broker]) -> None:
        self._random = random.Random(seed)
        self._brokers = brokers

    async def both(self, verb: Callable[[Broker], Awaitable[Any]]) -> Any:
        answers = [await verb(broker) for broker in self._brokers]
        assert answers[0] == answers[1]
        return answers[0]
