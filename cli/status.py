"""`headrace status`: what is there and how it is, once; `headrace top` shows the same as it changes."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from headrace.broker.messages import ScaleDecision
from headrace.broker.snapshot import Snapshot
from headrace.cli import options, views
from headrace.cli.processes import Process, processes
from headrace.cli.top import ApiKey, Url, seen_by


def command(
    config: options.Config = None,
    url: Url = None,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, with this host's processes.")] = False,
) -> None:
    """Show whether all is well: the queue and latencies of each model, the replicas and the pods."""
    settings = options.read(config)
    seen = asyncio.run(seen_by(url, api_key, settings))
    if as_json:
        typer.echo(json.dumps(_report(seen, [] if url else asyncio.run(processes(settings))), indent=2))
        return
    console = Console(highlight=False)
    console.print(views.screen(seen, console.width))


def _report(seen: Snapshot, own: list[Process]) -> dict[str, Any]:
    """The snapshot by names and ids, and the processes of this host."""
    said = msgspec.to_builtins(seen)
    return {
        "verdict": said["verdict"],
        "models": {model.pop("name"): model for model in said["models"]},
        "autoscaling": {
            f"{model.name} {number}": _row(each, seen.at_ms)
            for model in seen.models
            for number, each in enumerate(model.decisions)
        },
        "replicas": {replica.pop("id"): replica for replica in said["replicas"]},
        "pods": {pod.pop("id"): pod for pod in said["pods"]},
        "dead": said["dead"],
        "total": said["total"],
        "recent": said["recent"],
        "processes": own,
    }


def _row(each: ScaleDecision, at_ms: int) -> dict[str, object]:
    """A decision: when, what, why, and what was seen."""
    arrow = f"{each.before} to {each.target}" if each.direction != "hold" else f"{each.target}"
    return {
        "ago_s": round((at_ms - each.at_ms) / 1000, 1),
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
