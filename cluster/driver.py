"""The process that holds Ray: it deploys the models, says once a second that they are wanted, and drains at the end.

Its standard output is one JSON line for each change of a model's state, for `headrace serve`, which starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys

import msgspec

from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings
from headrace.cluster import deployment
from headrace.cluster.deployment import Deployed
from headrace.cluster.local import LocalRay

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


async def run(settings: Settings, broker: Broker, broker_url: str) -> None:
    """Serve all models on a local Ray until SIGTERM or SIGINT; then drain, and end Ray."""
    cpus = sum(model.cpus * model.replicas for model in settings.models)
    gpus = sum(model.gpus * model.replicas for model in settings.models)
    with LocalRay(cpus, gpus):
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets handlers of its own
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        deployment.deploy(settings, broker_url)
        log.info("models deployed", extra={"event": "deployed"})
        await _watch(settings, broker, stop)
        await _drain(settings, broker)


async def _watch(settings: Settings, broker: Broker, stop: asyncio.Event) -> None:
    """Once a second: who is wanted goes to the registry, what has changed to standard output."""
    known: dict[str, Deployed] = {}
    while not stop.is_set():
        for found in await asyncio.to_thread(deployment.deployed):
            if known.get(found.model) != found:
                known[found.model] = found
                _tell(found)
        await _be_present(settings, broker, known)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), min(_PERIOD_S, settings.queue.lease_s / 3))


async def _be_present(settings: Settings, broker: Broker, known: dict[str, Deployed]) -> None:
    """A model whose deployment has failed is not wanted: its requests are refused, not queued for ever."""
    for model in settings.models:
        is_failed = model.name in known and known[model.name].state == "failed"
        if model.replicas and not is_failed:
            with contextlib.suppress(BrokerDown):
                await broker.present("cluster", _id(), model.name, {})


async def _drain(settings: Settings, broker: Broker) -> None:
    log.info("draining", extra={"event": "draining"})
    await asyncio.to_thread(deployment.undeploy)
    while not await asyncio.to_thread(deployment.is_empty):  # noqa: ASYNC110  # Serve can only be asked
        await asyncio.sleep(0.1)
    for model in settings.models:
        with contextlib.suppress(BrokerDown):
            await broker.absent("cluster", _id(), model.name)


def _id() -> str:
    return f"cluster-{socket.gethostname()}-{os.getpid()}"


def _tell(found: Deployed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()
