"""The process that holds Ray: it deploys the models, watches them, and drains them at the end.

Its standard output is one JSON line for each change of a model's state, for `headrace serve`, which starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys

import msgspec

from headrace.broker.models import Model
from headrace.broker.models_file import ModelsFile
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.cluster.deployment import Deployed
from headrace.cluster.fleet import Fleet
from headrace.cluster.local import JoinedRay, LocalRay
from headrace.cluster.watch import Watch

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


async def run(settings: Settings, worker_url: str, scaler_url: str, models: ModelsFile) -> None:
    """Serve all models, as the file has them, until SIGTERM or SIGINT; then drain, and leave Ray. A local one ends."""
    with _ray(settings):
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets handlers of its own
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        fleet = Fleet(worker_url, scaler_url)
        fleet.follow(settings)
        broker = RedisBroker(scaler_url, settings.redis, settings.queue)
        try:
            await _watch(settings, models, fleet, broker, stop)
        finally:
            await broker.close()
        await _drain(fleet)


def _ray(settings: Settings) -> LocalRay | JoinedRay:
    if settings.ray.address is not None:
        return JoinedRay(settings.ray.address)
    cpus = sum(model.cpus * _most(model) for model in settings.models)
    gpus = sum(model.gpus * _most(model) for model in settings.models)
    return LocalRay(cpus, gpus)


def _most(model: Model) -> int:
    return model.replicas if model.autoscaling is None else model.autoscaling.max_replicas


async def _watch(settings: Settings, models: ModelsFile, fleet: Fleet, broker: Broker, stop: asyncio.Event) -> None:
    """Once a second, say what has changed, and do what has to."""
    known: dict[str, Deployed] = {}
    watch = Watch(broker, settings.ray.placement_s)
    while not stop.is_set():
        if (changed := models.changed()) is not None:
            settings = changed
            await asyncio.to_thread(fleet.follow, settings)
        for found in await watch.once(settings.models):
            if known.get(found.model) != found:
                known[found.model] = found
                _tell(found)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), _PERIOD_S)


async def _drain(fleet: Fleet) -> None:
    log.info("draining", extra={"event": "draining"})
    await asyncio.to_thread(fleet.end)
    while await asyncio.to_thread(fleet.is_there):  # noqa: ASYNC110  # Serve can only be asked
        await asyncio.sleep(0.1)


def _tell(found: Deployed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()
