"""`headrace simulate`: replay traces against autoscaling laws, compare them, and plan capacity. Needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from headrace.broker.errors import ConfigError

if TYPE_CHECKING:
    from headrace.cluster.simulation.fleet import ReplicaModel, World
    from headrace.cluster.simulation.sweep import Row
    from headrace.cluster.simulation.trace import Trace


def command(  # noqa: PLR0913  # a command's options
    trace: Annotated[
        list[str],
        typer.Option(
            help="A .csv of arrival, input and output tokens, a Mooncake .jsonl, or steady, ramp, step, square."
        ),
    ],
    policy: Annotated[str, typer.Option(help="headrace, a rival, oracle, several with commas, or all.")] = "headrace",
    start_up: Annotated[list[float] | None, typer.Option(help="Seconds a replica takes to start; default 30.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with other start-up times and victims.")] = 1,
    scale: Annotated[int, typer.Option(min=1, max=1000, help="So many copies of the trace, turned in time.")] = 1,
    floors: Annotated[str, typer.Option(help="The fewest replicas, several with commas.")] = "1",
    max_replicas: Annotated[int, typer.Option(min=1, max=4096)] = 24,
    prefill_rate: Annotated[float, typer.Option(min=1, help="Prompt tokens a second of one replica.")] = 20_000.0,
    slots: Annotated[int, typer.Option(min=1)] = 64,
    step_ms: Annotated[float, typer.Option(min=0.01, help="A decode step with all slots at work.")] = 25.0,
    kv_tokens: Annotated[int, typer.Option(min=1, help="KV room of a replica.")] = 400_000,
    ttft_slo_ms: Annotated[float, typer.Option(min=1, help="To which 1.5 x the own prefill time is added.")] = 500.0,
    tpot_slo_ms: Annotated[float, typer.Option(min=0.1)] = 50.0,
    failures: Annotated[float, typer.Option(min=0, help="Of each replica, an hour.")] = 0.0,
    plan: Annotated[
        bool, typer.Option("--plan", help="How many replicas does this trace need, and at what cost?")
    ] = False,
    attainment: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of --plan.")] = 0.99,
    price: Annotated[float, typer.Option(min=0, help="Of --plan: for a replica and hour.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line for each run.")] = False,
    prefixes: Annotated[
        bool, typer.Option("--prefixes", help="What is prefix affinity worth on a trace that names blocks of prompts?")
    ] = False,
    replicas: Annotated[str, typer.Option(help="Of --prefixes: how many, several with commas.")] = "4,8",
    caches: Annotated[
        str, typer.Option(help="Of --prefixes: room of a replica's cache in tokens, several with commas; 0 is endless.")
    ] = "0",
    pictures: Annotated[Path | None, typer.Option(help="A folder for pictures of the fronts and of a run.")] = None,
) -> None:
    """Replay traces against autoscaling laws. The tables of docs/autoscaling.md are made so."""
    try:
        from headrace.cluster.simulation.fleet import ReplicaModel, World
        from headrace.cluster.simulation.trace import load
    except ImportError as error:
        raise ConfigError(f"simulate needs {error.name}: pip install 'headrace[simulate]'") from None

    model = ReplicaModel(prefill_rate, slots, step_ms / 1000, kv_tokens=kv_tokens)
    traces = [load(each).scaled(scale) for each in trace]
    worlds = [
        World(
            start_up_s=each,
            failures_per_hour=failures,
            ttft_slo_s=ttft_slo_ms / 1000,
            tpot_slo_s=tpot_slo_ms / 1000,
            max_replicas=max_replicas,
        )
        for each in start_up or [30.0]
    ]
    asked = _Asked(_names(policy), seeds, _numbers("--floors", floors, 1), as_json, pictures)
    for one in traces:
        if prefixes:
            _prefixes(one, model, _numbers("--replicas", replicas, 1), _numbers("--caches", caches, 0), as_json=as_json)
            continue
        for world in worlds:
            if plan:
                _plan(one, model, world, attainment, price, as_json=as_json)
            else:
                _sweep(one, model, world, asked)


@dataclass(frozen=True)
class _Asked:
    names: list[str]
    seeds: int
    floors: list[int]
    as_json: bool
    pictures: Path | None


def _names(policy: str) -> list[str]:
    from headrace.cluster.simulation.sweep import POLICIES

    names = list(POLICIES) if policy == "all" else [name.strip() for name in policy.split(",")]
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"--policy {name!r}: is not one of {', '.join(POLICIES)}, all")
    return names


def _numbers(option: str, text: str, least: int) -> list[int]:
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text!r}: must be whole numbers with commas between") from None
    if min(found) < least:
        raise ConfigError(f"{option} {text!r}: must be at least {least}")
    return found


def _prefixes(trace: Trace, model: ReplicaModel, replicas: list[int], caches: list[int], *, as_json: bool) -> None:
    from headrace.cluster.simulation.prefix_fleet import PLACEMENTS
    from headrace.cluster.simulation.prefix_table import compare, table

    rows = []
    for row in compare(trace, model, replicas, caches, list(PLACEMENTS)):
        rows.append(row)
        if as_json:
            typer.echo(msgspec.json.encode(row).decode())
    if not as_json:
        _show(table(rows), f"{trace.name}: prompts that meet a cache")


def _sweep(trace: Trace, model: ReplicaModel, world: World, asked: _Asked) -> None:
    from headrace.cluster.simulation import picture, report
    from headrace.cluster.simulation.sweep import sweep

    rows = list(_told(sweep(trace, model, world, asked.names, asked.seeds, asked.floors), asked.as_json))
    title = f"{trace.name}, start-up {world.start_up_s:g} s"
    if not asked.as_json:
        _show(report.costs(rows), f"{title}: replica-hours at an attainment")
        if len(asked.names) == 1:
            _show(report.runs(rows), title)
    if asked.pictures:
        name = f"{trace.name.replace(' ', '_')}_{world.start_up_s:g}s"
        picture.pareto(rows, title, asked.pictures / f"pareto_{name}.png")
        _draw(trace, model, world, asked.pictures / f"run_{name}.png")


def _told(rows: Iterator[Row], as_json: bool) -> Iterator[Row]:
    for row in rows:
        if as_json:
            typer.echo(msgspec.json.encode(row).decode())
        yield row


def _draw(trace: Trace, model: ReplicaModel, world: World, file: Path) -> None:
    from headrace.cluster.simulation import picture, sweep

    policy = sweep.policy_of("headrace", 0.99, model, world)
    made = sweep.run(trace, model, world, policy, sweep.usual_start(trace, model))
    title = f"{trace.name}, start-up {world.start_up_s:g} s: headrace at 99 %, {float(made.is_met.mean()):.2%} attained"
    picture.timeline(made, model, title, file)


def _plan(trace: Trace, model: ReplicaModel, world: World, attainment: float, price: float, *, as_json: bool) -> None:
    from headrace.cluster.simulation.plan import plan, sentences

    found = plan(trace, model, world, attainment, price)
    typer.echo(msgspec.json.encode(found).decode() if as_json else "\n".join(sentences(found, price)))


def _show(lines: list[list[str]], title: str) -> None:
    head, *body = lines
    table = Table(*head, title=title, title_justify="left")
    for line in body:
        table.add_row(*line)
    Console().print(table)
