"""`headrace worker`: one replica, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated

import typer

from headrace.broker import logs
from headrace.broker.errors import EngineFailed
from headrace.broker.models import Model
from headrace.broker.outage import open_when_up
from headrace.broker.settings import Settings
from headrace.broker.tasks import loop_factory
from headrace.cli import options


def command(
    config: options.Config = None,
    model: Annotated[str | None, typer.Option(help="The model to serve; default: the first one.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Serve /metrics here; default: worker.metrics_port.")] = None,
) -> None:
    """Run one replica of a model. The first SIGTERM or Ctrl-C drains it, the second hands its jobs back at once.

    It waits for a broker that is down. If its engine hangs it hands its jobs back and exits with 1, to be started anew.
    """
    settings = options.read(config)
    logs.configure(settings.log_level, settings.log_format)
    chosen = settings.model(model) if model else settings.models[0]
    port = settings.worker.metrics_port if metrics_port is None else metrics_port
    if port:
        from prometheus_client import start_http_server

        start_http_server(port, settings.api.host)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_run(settings, chosen))
        except EngineFailed as error:
            typer.echo(f"headrace: {error.message}", err=True)
            os._exit(1)  # a thread of an engine that hangs would keep the process


async def _run(settings: Settings, model: Model) -> None:
    from headrace.workers import engines
    from headrace.workers.worker import Worker

    broker = options.broker_of(settings)
    await open_when_up(broker)
    worker = Worker(settings, model, broker, engines.make(model, settings.data_dir))
    loop, drains = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def stop() -> None:
        drains.add(loop.create_task(worker.release_all() if drains else worker.drain()))

    await worker.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await worker.run()
    finally:
        await broker.close()
