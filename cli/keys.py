"""`headrace keys`: make an API key."""

from __future__ import annotations

import hashlib
import secrets
from typing import Annotated

import typer

app = typer.Typer(help="API keys.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """API keys."""


@app.command("new")
def new(owner: Annotated[str, typer.Argument(help="Who the key speaks for.")]) -> None:
    """Print a new key, once, and the line for headrace.yaml, which holds only its SHA-256."""
    key = f"hr-{secrets.token_urlsafe(32)}"
    typer.echo(f"key (shown only now): {key}")
    typer.echo(
        f"for headrace.yaml, under keys:\n  - {{owner: {owner}, sha256: {hashlib.sha256(key.encode()).hexdigest()}}}"
    )
