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
from headrace.broker.settings import Settings
from headrace.cluster import deployment
from headrace.cluster.deployment import Deployed
from headrace.cluster.local import LocalRay

log = logging.getLogger(__name__)

_PERIOD_S = 1.0


async def run(settings: Settings, worker_url: str, scaler_url: str) -> None:
    """Serve all models on a local Ray until SIGTERM or SIGINT; then drain, and end Ray."""
    cpus = sum(model.cpus * _most(model) for model in settings.models)
    gpus = sum(model.gpus * _most(model) for model in settings.models)
    with LocalRay(cpus, gpus):
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray, which sets handlers of its own
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        deployment.deploy(settings, worker_url, scaler_url)
        log.info("models deployed", extra={"event": "deployed"})
        await _watch(stop)
        await _drain()


def _most(model: Model) -> int:
    return model.replicas if model.autoscaling is None else model.autoscaling.max_replicas


async def _watch(stop: asyncio.Event) -> None:
    """Once a second, say what has changed."""
    known: dict[str, Deployed] = {}
    while not stop.is_set():
        for found in await asyncio.to_thread(deployment.deployed):
            if known.get(found.model) != found:
                known[found.model] = found
                _tell(found)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), _PERIOD_S)


async def _drain() -> None:
    log.info("draining", extra={"event": "draining"})
    await asyncio.to_thread(deployment.undeploy)
    while not await asyncio.to_thread(deployment.is_empty):  # noqa: ASYNC110  # Serve can only be asked
        await asyncio.sleep(0.1)


def _tell(found: Deployed) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    sys.stdout.buffer.flush()
