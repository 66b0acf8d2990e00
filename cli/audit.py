"""`headrace audit`: who was refused, and who did what."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli import options


def command(
    config: options.Config = None,
    count: Annotated[int, typer.Option(min=1, max=10_000, help="So many, the last first.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Show what was noted: changes of keys, what admins did, and refused logins. It is kept for 90 days."""
    noted = options.with_broker(config, lambda broker: broker.ledger.notes(count))
    rows = [
        {
            "when": datetime.fromtimestamp(each.at_ms / 1000, UTC).isoformat(timespec="seconds"),
            "who": each.entry.actor,
            "what": each.entry.action,
            "about": each.entry.subject,
            "detail": each.entry.detail,
        }
        for each in noted
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("when", "who", "what", "about", "detail")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table if rows else "nothing")
