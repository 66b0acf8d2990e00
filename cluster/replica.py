"""One replica as Serve sees it: a class that Serve constructs, asks for its health, and takes down."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from headrace.broker import logs
from headrace.broker.errors import EngineFailed
from headrace.broker.outage import open_when_up
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.broker.tasks import collect_less
from headrace.workers import engines
from headrace.workers.scrape import MetricsServer
from headrace.workers.worker import Worker


class Replica:
    """A `Worker` in Serve's own event loop. Serve calls it starting until the constructor returns, and loaded then."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, plain_settings: dict[str, Any], model: str, broker_url: str
    ) -> None:
        settings = msgspec.convert(plain_settings, Settings)
        logs.configure(settings.log_level, settings.log_format, name="headrace")  # the rest of the process is Ray's
        chosen = settings.model(model)
        self._broker = RedisBroker(broker_url, settings.redis, settings.queue)
        self._engine = engines.make(chosen, settings.data_dir)
        self._metrics = MetricsServer(settings)
        self._worker = Worker(settings, chosen, self._broker, self._engine, self._metrics.location, _node())
        await open_when_up(self._broker)
        await self._worker.start()
        collect_less()
        self._task = asyncio.create_task(self._worker.run(), name="worker")

    async def check_health(self) -> None:
        """Raise what is wrong; after three times in a row Serve starts another replica and takes this one down."""
        if self._task.done():
            raise EngineFailed("the replica's loop has ended") from self._task.exception()
        self._worker.check_health()
        await self._engine.check_health()

    async def __del__(self) -> None:
        """Drain; Serve awaits this inside its graceful shutdown. A constructor that failed has nothing to drain."""
        if hasattr(self, "_task"):
            await self._worker.drain()
            await asyncio.wait([self._task])
        if hasattr(self, "_broker"):
            await self._broker.close()


def _node() -> str:
    """Ray's id of the node that this process runs on."""
    import ray

    return ray.get_runtime_context().get_node_id()
