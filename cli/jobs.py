"""`headrace jobs`: one job by its id, and the dead letters: those that lost too many workers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from headrace.broker import dead, keys
from headrace.broker.errors import BadRequest, JobNotFound
from headrace.broker.protocol import Broker, DeadLetter
from headrace.cli import options

_AT_MOST = 10_000

Id = Annotated[str, typer.Argument(help="The job: 32 hex digits, as in X-Request-Id.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable.")]

app = typer.Typer(help="Jobs, and the dead letters among them.", no_args_is_help=True)


@app.command("dead")
def show_dead(config: options.Config = None, as_json: Json = False) -> None:
    """List the jobs that lost too many workers, the last first. They are kept for queue.dead_letter_ttl_s."""
    rows = [_row(letter) for letter in options.with_broker(config, _dead_letters)]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    elif rows:
        table = Table()
        for name in rows[0]:
            table.add_column(name, no_wrap=name == "id", overflow="fold")
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        Console().print(table)
    else:
        typer.echo("no dead letters")


@app.command("requeue")
def requeue(job: Id, config: options.Config = None) -> None:
    """Put a dead letter back into the queue, as a new job whose id is printed; the dead letter is removed then."""
    typer.echo(options.with_broker(config, lambda broker: _requeue(broker, job)))


@app.command("expire")
def expire(
    job: Annotated[str | None, typer.Argument(help="The dead letter.")] = None,
    is_all: Annotated[bool, typer.Option("--all", help="All dead letters.")] = False,
    config: options.Config = None,
) -> None:
    """Keep a dead letter, or all, no longer: the log can be read for queue.log_ttl_s more."""
    if (job is None) != is_all:
        raise typer.BadParameter("say either which one, or --all")
    expired = options.with_broker(config, lambda broker: _expire(broker, job))
    typer.echo(f"{expired} expired")


@app.command("show")
def show(job: Id, config: options.Config = None) -> None:
    """Show where a job is, as JSON."""
    typer.echo(json.dumps(options.with_broker(config, lambda broker: _status(broker, _checked(broker, job))), indent=2))


def _checked(broker: Broker, job: str) -> str:
    if not keys.is_job_id(job, broker.shards):
        raise BadRequest(f"{job[:64]!r} is not the id of a job, which is 32 hex digits")
    return job


async def _dead_letters(broker: Broker) -> list[DeadLetter]:
    found = [letter for shard in range(broker.shards) for letter in await broker.dead_letters(shard, _AT_MOST)]
    return sorted(found, key=lambda letter: letter.died_ms, reverse=True)


async def _requeue(broker: Broker, job: str) -> str:
    await options.note(broker, "dead_letter_requeued", f"job {_checked(broker, job)}")
    return await dead.requeue(broker, job)


async def _expire(broker: Broker, job: str | None) -> int:
    await options.note(broker, "dead_letter_expired", f"job {job}" if job else "all jobs")
    if job is None:
        return sum([await broker.expire(letter.job.id) for letter in await _dead_letters(broker)])
    if not await broker.expire(_checked(broker, job)):
        raise JobNotFound("there is no such dead letter")
    return 1


async def _status(broker: Broker, job: str) -> dict[str, object]:
    status = await broker.status(job)
    if status is None:
        raise JobNotFound("there is no such job, or it has expired")
    letter = await broker.dead_letter(job)
    return {
        "id": job,
        "state": status.state,
        "model": status.view.model,
        "owner": status.view.owner,
        "format": status.view.format,
        "band": status.view.band,
        "attempt": status.attempt,
        "deaths": status.deaths,
        "ahead": status.ahead,
        "last": status.last,
        "dead": None if letter is None else _row(letter),
    }


def _row(letter: DeadLetter) -> dict[str, str | int]:
    return {
        "id": letter.job.id,
        "model": letter.job.model,
        "owner": letter.view.owner,
        "deaths": letter.deaths,
        "when": datetime.fromtimestamp(letter.died_ms / 1000, UTC).isoformat(timespec="seconds"),
        "error": letter.died_of,
        "worker": letter.died_with,
    }
