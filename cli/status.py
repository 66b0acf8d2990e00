"""`headrace status`: what is there and how it is."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.cli import options
from headrace.cli.processes import processes


def command(
    config: options.Config = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, with this host's processes.")] = False,
) -> None:
    """Show the queue of each model, the replicas and the pods."""
    settings = options.read(config)
    report = asyncio.run(_report(settings))
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        _show(report)


async def _report(settings: Settings) -> dict[str, object]:
    broker = options.broker_of(settings)
    try:
        return {
            "models": {model.name: await _model(broker, model.name) for model in settings.models},
            "replicas": await broker.listing("replicas"),
            "pods": await broker.listing("pods"),
            "processes": await processes(settings),
        }
    finally:
        await broker.close()


async def _model(broker: RedisBroker, name: str) -> dict[str, object]:
    stats = await broker.stats(name)
    return {"waiting": stats.waiting, "oldest_s": stats.oldest_ms / 1000, "running": stats.running}


def _show(report: dict[str, object]) -> None:
    console = Console()
    for title in ("models", "replicas", "pods"):
        rows = report[title]
        assert isinstance(rows, dict)
        columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != "details"))
        table = Table("", *columns, title=title, title_justify="left")
        for name, row in rows.items():
            table.add_row(name, *(_cell(row.get(column, "")) for column in columns))
        console.print(table if rows else f"{title}: none")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {count}" for name, count in value.items() if count) or "0"
    return str(value)
