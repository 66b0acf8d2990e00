"""Options and set-up that several commands share."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.broker import embedded, settings
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The configuration file; default: ./headrace.yaml, else the built-in one."),
]


def read(config: Path | None) -> Settings:
    """The configuration, with the environment's overrides; raises ConfigError."""
    return settings.load(config, os.environ)


def broker_of(read_settings: Settings) -> RedisBroker:
    """The broker that this configuration means, not connected yet."""
    url = read_settings.redis.url or embedded.url(read_settings.data_dir)
    return RedisBroker(url, read_settings.redis, read_settings.queue)


def log_to_stderr(level: str) -> None:
    """One line an event: time, level, its stable word, the sentence. Called by entry points only."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Line("%(asctime)s %(levelname)-7s %(event)-16s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = record.__dict__
        fields.setdefault("event", "-")
        return super().format(record)
