"""Options and set-up that several commands share."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from msgspec import structs

from headrace.broker import embedded, settings
from headrace.broker.ledger import AuditEntry
from headrace.broker.protocol import Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings

T = TypeVar("T")

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="The configuration file; default: ./headrace.yaml, else the built-in one."),
]


Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let anybody in who reaches the pod, as long as there are no keys.")
]


def read(config: Path | None) -> Settings:
    """The configuration, with the environment's overrides; raises ConfigError."""
    return settings.load(config, os.environ)


def let_in(settings: Settings, insecure: bool) -> Settings:
    """The configuration with `--insecure`, which the children of this process are told too."""
    if not insecure:
        return settings
    os.environ["HEADRACE_API__INSECURE"] = "true"
    return structs.replace(settings, api=structs.replace(settings.api, insecure=True))


def broker_of(read_settings: Settings, user: str) -> RedisBroker:
    """The broker that this configuration means, not connected yet; `user` is who we are to an embedded one."""
    url = read_settings.redis.url or embedded.url(read_settings.data_dir, user)
    return RedisBroker(url, read_settings.redis, read_settings.queue)


def with_broker(config: Path | None, ask: Callable[[Broker], Awaitable[T]]) -> T:
    """Ask the broker of a configuration something, and answer that."""

    async def run() -> T:
        broker = broker_of(read(config), "ops")
        try:
            return await ask(broker)
        finally:
            await broker.close()

    return asyncio.run(run())


async def note(broker: Broker, action: str, subject: str, detail: str = "") -> None:
    """Note for the audit what is done from this command line, by whom."""
    await broker.ledger.note(AuditEntry(f"{getpass.getuser()}@{socket.gethostname()}", action, subject, detail))
