"""`headrace cluster`: the child of `serve` that holds Ray; not for people."""

from __future__ import annotations

import asyncio
import os

from headrace.broker import embedded, logs
from headrace.broker.models_file import ModelsFile
from headrace.cli import options


def command(config: options.Config = None) -> None:
    """Place the models' replicas on a local Ray."""
    from headrace.cluster import driver

    settings = options.read(config)
    logs.configure(settings.log_level, settings.log_format)
    worker, scaler = (settings.redis.url or embedded.url(settings.data_dir, user) for user in ("worker", "scaler"))
    asyncio.run(driver.run(settings, worker, scaler, ModelsFile(config, os.environ, settings)))
