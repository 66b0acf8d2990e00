"""Deployments on an empty server, on the event loop that pods run on, which leave nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

import pytest
import redis

from headrace.broker.models import ScriptedModel
from headrace.broker.settings import (
    ApiSettings,
    KeySettings,
    QueueSettings,
    RedisSettings,
    Settings,
    TracingSettings,
    WorkerSettings,
)
from headrace.broker.tasks import loop_factory
from tests.api.deployment import Deployment, MakeEngine, RecordingEngine, nothing_is_left
from tests.users import Server


class Deploy(Protocol):
    """Bring up a deployment; each mapping holds the settings that are not the defaults."""

    async def __call__(
        self,
        model: Mapping[str, Any] = ...,
        queue: Mapping[str, Any] = ...,
        api: Mapping[str, Any] = ...,
        *,
        pods: int = 1,
        workers: int = 1,
        keys: Sequence[KeySettings] = (),
        shards: int = 1,
        engine: MakeEngine = RecordingEngine,
        tracing: Mapping[str, Any] = ...,
    ) -> Deployment: ...


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop of production, whose clock and sockets are not asyncio's."""
    return {"pod": loop_factory() or asyncio.new_event_loop}


@pytest.fixture
async def deploy(redis_server: Server, redis_client: redis.Redis) -> AsyncIterator[Deploy]:
    up: list[Deployment] = []

    async def make(
        model: Mapping[str, Any] = {},  # read only
        queue: Mapping[str, Any] = {},
        api: Mapping[str, Any] = {},
        *,
        pods: int = 1,
        workers: int = 1,
        keys: Sequence[KeySettings] = (),
        shards: int = 1,
        engine: MakeEngine = RecordingEngine,
        tracing: Mapping[str, Any] = {},
    ) -> Deployment:
        settings = Settings(
            [ScriptedModel(**{"name": "scripted", "slots": 64, "tokens_per_s": 0.0, **model})],
            queue=QueueSettings(**queue),
            api=ApiSettings(**{"drain_s": 1.0, **api}),
            worker=WorkerSettings(drain_s=0.1),
            redis=RedisSettings(shards=shards),
            keys=list(keys),
            tracing=TracingSettings(**tracing),
        )
        up.append(Deployment(settings, redis_server))
        await up[-1].start(pods, workers, engine)
        return up[-1]

    yield make
    try:
        await nothing_is_left(up)
    finally:
        for each in up:
            await each.stop()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
