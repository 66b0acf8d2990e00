"""`headrace`: the commands, and how an error is said: in one line, with an exit status."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from headrace.broker.errors import BrokerDown, ConfigError, HeadraceError
from headrace.cli import (
    api,
    audit,
    bench,
    chat,
    cluster,
    jobs,
    keys,
    redis,
    serve,
    simulate,
    status,
    top,
    usage,
    worker,
)

app = typer.Typer(
    name="headrace",
    help="Serve language models to many users: every request through a queue, every token through a log.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.command)
app.command("api")(api.command)
app.command("worker")(worker.command)
app.command("cluster", hidden=True)(cluster.command)
app.command("chat")(chat.command)
app.command("bench")(bench.command)
app.command("simulate")(simulate.command)
app.command("status")(status.command)
app.command("top")(top.command)
app.command("redis-acl")(redis.acl_command)
app.command("redis-functions")(redis.functions_command)
app.add_typer(jobs.app, name="jobs")
app.add_typer(keys.app, name="keys")
app.command("audit")(audit.command)
app.command("usage")(usage.command)


def _say_version(value: bool) -> None:
    if value:
        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def headrace(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help="Say the version, and end.")
    ] = False,
) -> None:
    """Serve language models to many users: every request through a queue, every token through a log."""


def main() -> None:
    """Run a command; a wrong configuration exits with 2, another error of ours with 1, both without a traceback."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"headrace: {error.message}", err=True)
        sys.exit(2)
    except BrokerDown as error:
        hint = "Is `headrace serve` running on this data folder? Else start it, or set HEADRACE_DATA or redis.url."
        typer.echo(f"headrace: {error.message} {hint}", err=True)
        sys.exit(1)
    except HeadraceError as error:
        typer.echo(f"headrace: {error.message}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
