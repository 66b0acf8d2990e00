"""`headrace worker`: one replica, without Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Annotated

import typer
from msgspec import structs

from headrace.broker import logs
from headrace.broker.errors import EngineFailed
from headrace.broker.models import Model
from headrace.broker.outage import open_when_up
from headrace.broker.settings import Settings
from headrace.broker.tasks import collect_less, loop_factory
from headrace.cli import options


def command(
    config: options.Config = None,
    model: Annotated[str | None, typer.Option(help="The model to serve; default: the first one.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Serve /metrics here or after it; default: worker.metrics_port."),
    ] = None,
) -> None:
    """Run one replica of a model. The first SIGTERM or Ctrl-C drains it, the second hands its jobs back at once.

    It waits for a broker that is down. If its engine hangs it hands its jobs back and exits with 1, to be started anew.
    """
    settings = options.read(config)
    logs.configure(settings.log_level, settings.log_format)
    chosen = settings.model(model) if model else settings.models[0]
    if metrics_port is not None:
        settings = structs.replace(settings, worker=structs.replace(settings.worker, metrics_port=metrics_port))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            runner.run(_run(settings, chosen))
        except EngineFailed as error:
            typer.echo(f"headrace: {error.message}", err=True)
            os._exit(1)  # a thread of an engine that hangs would keep the process


async def _run(settings: Settings, model: Model) -> None:
    from headrace.workers import engines
    from headrace.workers.scrape import MetricsServer
    from headrace.workers.worker import Worker

    broker = options.broker_of(settings, "worker")
    await open_when_up(broker)
    metrics_at = MetricsServer(settings).location  # it ends with the process
    worker = Worker(settings, model, broker, engines.make(model, settings.data_dir), metrics_at)
    loop, drains = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def stop() -> None:
        drains.add(loop.create_task(worker.release_all() if drains else worker.drain()))

    await worker.start()
    collect_less()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await worker.run()
    finally:
        await broker.close()
