"""A whole deployment in one process, for tests: the broker's server, one replica and real pods on free ports."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from headrace.api import server
from headrace.api.app import create_app
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.models import ScriptedModel
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import ApiSettings, Settings, WorkerSettings
from headrace.workers import engines
from headrace.workers.worker import Worker
from tests.support import eventually

_END_S = 15.0
"""A pod that has not ended by then never will; its test fails instead of hanging."""


def scripted_settings(redis_server: EmbeddedServer, *, tokens_per_s: float = 0.0) -> Settings:
    """One model `scripted` on the server of the whole run, whose data folder the socket stands in."""
    model = ScriptedModel(name="scripted", slots=256, tokens_per_s=tokens_per_s)
    data_dir = redis_server.data_dir
    return Settings([model], api=ApiSettings(drain_s=1.0), worker=WorkerSettings(drain_s=0.2), data_dir=data_dir)


class Pod(server.Server):
    """A pod that a test can stop; it leaves the process's signals alone."""

    def __init__(self, settings: Settings, broker: RedisBroker) -> None:
        self._listener = server.bind(settings, 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = create_app(settings, broker, self.url)
        super().__init__(server.configure(settings, app))
        self._task = asyncio.create_task(self.serve([self._listener]))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def die(self) -> None:
        """What clients see of a killed pod: every connection breaks, and no new one is taken."""
        for listener in self.servers:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def stop(self) -> None:
        self.should_exit = True
        await asyncio.wait_for(self._task, _END_S)


@contextlib.asynccontextmanager
async def serving(settings: Settings, redis_server: EmbeddedServer, pods: int = 1) -> AsyncIterator[list[Pod]]:
    """Everything up, until the block ends."""

    def new_broker(user: str) -> RedisBroker:
        return RedisBroker(redis_server.url_of(user), settings.redis, settings.queue)

    broker = new_broker("worker")
    await broker.open()
    worker = Worker(settings, settings.models[0], broker, engines.make(settings.models[0], settings.data_dir))
    await worker.start()
    running = asyncio.create_task(worker.run())
    up = [Pod(settings, new_broker("gateway")) for _ in range(pods)]
    try:
        await eventually(lambda: all(pod.started for pod in up))
        yield up
    finally:
        await asyncio.gather(*(pod.stop() for pod in up))
        await worker.drain()
        await running
        await broker.close()
