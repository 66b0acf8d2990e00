"""`headrace bench`: put load on pods, check every token, and say what it took and what it cost."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from headrace.broker.errors import BrokerDown
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import Settings
from headrace.cli import options
from headrace.cli.bench_ready import wait_ready
from headrace.cli.bench_report import Report, costs, report, show
from headrace.cli.load import Load
from headrace.cli.load_checks import Check, OracleCheck, OrderCheck
from headrace.cli.load_plan import Plan
from headrace.cli.processes import Process, Usage, processes, usage


def command(  # noqa: PLR0913  # each is an option of the command line
    config: options.Config = None,
    url: Annotated[list[str] | None, typer.Option(help="A pod; say it again for more, used in turn.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first model of the configuration.")] = None,
    streams: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many streams at once (20).")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: requests a second, Poisson.")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many requests.")] = None,
    duration: Annotated[float | None, typer.Option(min=0.0, help="Begin requests for so many seconds (10).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    prompt_bytes: Annotated[int, typer.Option(min=1, help="Bytes of each prompt.")] = 64,
    resume_every: Annotated[int, typer.Option(min=0, help="Cut and resume on the next pod after so many tokens.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides prompts, arrivals and the model's seeds.")] = 0,
    api_key: Annotated[str | None, typer.Option(envvar="HEADRACE_API_KEY", help="The key to send.")] = None,
    until_ready: Annotated[float, typer.Option(min=0.0, help="Wait so many seconds for pods and a replica.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Load the pods and check every token; exits with 1 on any error or mismatch."""
    from headrace.broker.tasks import loop_factory

    settings = options.read(config)
    if streams is not None and rate is not None:
        raise typer.BadParameter("either --streams (closed loop) or --rate (open loop)")
    chosen = model or settings.models[0].name
    plan = Plan(
        url or [f"http://{settings.api.host}:{settings.api.port}"],
        chosen,
        streams=None if rate else streams or 20,
        rate=rate or 0.0,
        requests=requests,
        duration_s=10.0 if requests is None and duration is None else duration,
        max_tokens=max_tokens,
        prompt_bytes=prompt_bytes,
        resume_every=resume_every,
        seed=seed,
        api_key=api_key,
        check=check_for(settings, chosen),
    )
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        told = runner.run(bench(settings, plan, until_ready))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=2))
    else:
        show(told, Console())
    if not told.is_clean:
        raise typer.Exit(1)


def check_for(settings: Settings, model: str) -> type[Check]:
    """The oracle where the configuration says that the words are known."""
    scripted = any(
        isinstance(each, ScriptedModel) and each.name == model and not each.script for each in settings.models
    )
    return OracleCheck if scripted else OrderCheck


async def bench(settings: Settings, plan: Plan, until_ready_s: float = 0.0) -> Report:
    """Run a plan and measure the processes of this host meanwhile."""
    if until_ready_s:
        await wait_ready(settings, plan, until_ready_s)
    found = await _processes(settings)
    before = _usage(found)
    load = Load(plan)
    shown = asyncio.create_task(_show_progress(load), name="progress")
    try:
        totals = await load.run()
    finally:
        shown.cancel()
        await asyncio.wait([shown])
    found += [process for process in await _processes(settings) if process not in found]
    return report(totals, costs(found, before, _usage(found), totals.tokens), os.getpid())


async def _processes(settings: Settings) -> list[Process]:
    """None if the broker cannot be asked from here: the pods may be elsewhere."""
    try:
        return await processes(settings)
    except BrokerDown:
        return []


def _usage(found: list[Process]) -> dict[int, Usage]:
    return usage(process["pid"] for process in found)


async def _show_progress(load: Load) -> None:
    if not sys.stderr.isatty():
        return
    with Console(stderr=True).status("starting") as status:
        while True:
            totals = load.totals
            status.update(f"{totals.done} of {totals.begun} begun requests done, {len(totals.itl)} pieces of text")
            await asyncio.sleep(0.5)
