"""`headrace status`: what is there and how it is."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.cli import options
from headrace.cli.processes import processes

_DECISIONS = 10
"""So many decisions of each model's autoscaler are shown."""


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
            "autoscaling": {
                f"{model.name} {number}": row
                for model in settings.models
                if model.autoscaling is not None
                for number, row in enumerate(await _decisions(broker, model.name))
            },
            "replicas": await broker.listing("replicas"),
            "pods": await broker.listing("pods"),
            "processes": await processes(settings),
        }
    finally:
        await broker.close()


async def _model(broker: RedisBroker, name: str) -> dict[str, object]:
    stats = await broker.stats(name)
    return {"waiting": stats.waiting, "oldest_s": stats.oldest_ms / 1000, "running": stats.running}


async def _decisions(broker: RedisBroker, name: str) -> list[dict[str, object]]:
    """The last decisions, newest first: when, what, why, and what was seen."""
    rows = []
    for each in await broker.decisions(name, _DECISIONS):
        arrow = f"{each.before} to {each.target}" if each.direction != "hold" else f"{each.target}"
        rows.append(
            {
                "ago_s": round(time.time() - each.at_ms / 1000, 1),
                "decision": f"{each.direction} {arrow}" + (" (advice)" if each.is_advice else ""),
                "reason": each.reason,
                "wanted": each.wanted,
                "waiting": each.waiting,
                "waiting_tokens": each.waiting_tokens,
                "oldest_s": each.oldest_ms / 1000,
                "running": each.running,
                "ready": each.ready,
                "starting": each.starting,
            }
        )
    return rows


def _show(report: dict[str, object]) -> None:
    console = Console()
    for title in ("models", "autoscaling", "replicas", "pods"):
        rows = report[title]
        assert isinstance(rows, dict)
        if title == "autoscaling" and not rows:
            continue
        columns = list(dict.fromkeys(name for row in rows.values() for name in row if name != "details"))
        table = Table("", *columns, title=title, title_justify="left")
        for name, row in rows.items():
            table.add_row(name, *(_cell(row.get(column, "")) for column in columns))
        console.print(table if rows else f"{title}: none")


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {count}" for name, count in value.items() if count) or "0"
    return str(value)
