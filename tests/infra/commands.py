"""A command of ours as an image or a manifest has it, held against the command line itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from headrace.cli.main import app


def parse(command: Sequence[str]) -> dict[str, Any]:
    """The parameters that `headrace <command>` would run with; fails as the command line fails."""
    group: Any = typer.main.get_command(app)
    with group.make_context("headrace", list(command), resilient_parsing=True) as context:
        name, found, rest = group.resolve_command(context, list(command))
        parameters: dict[str, Any] = found.make_context(name, rest, parent=context).params
    return parameters
