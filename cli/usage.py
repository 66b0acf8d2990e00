"""`headrace usage`: what each owner has used, by day and model."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.broker.ledger import DAY_MS, Used
from headrace.broker.protocol import Broker
from headrace.cli import options


def command(
    config: options.Config = None,
    owner: Annotated[str | None, typer.Option(help="Only this owner's.")] = None,
    days: Annotated[int, typer.Option(min=1, max=35, help="So many days, today the last.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show how many requests and tokens each owner has used, by the day (UTC) on which the requests ended."""
    found = options.with_broker(config, lambda broker: _usage(broker, days))
    rows = [row_of(used) for used in found if owner in (None, used.owner)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("date", "owner", "model", "requests", "prompt tokens", "completion tokens")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table if rows else "nothing was used")


async def _usage(broker: Broker, days: int) -> list[Used]:
    today = time.time_ns() // 1_000_000 // DAY_MS
    return [used for day in range(today, today - days, -1) for used in await broker.ledger.usage(day)]


def row_of(used: Used) -> dict[str, str | int]:
    date = datetime.fromtimestamp(used.day * DAY_MS / 1000, UTC).date().isoformat()
    return {"date": date, **{name: value for name, value in used._asdict().items() if name != "day"}}
