"""A snapshot as a terminal shows it: the same figures as `/ops`, in as many columns and rows as there is room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.broker.snapshot import Latency, ModelNow, Snapshot
from headrace.broker.verdict import State, Trouble, Verdict

_STYLES: dict[State, str] = {"well": "bold green", "strained": "bold yellow", "failing": "bold red"}
_WORDS: dict[State, str] = {"well": "All is well", "strained": "Strained", "failing": "Failing"}
_WIDE, _MIDDLE = 110, 74
_FEW_ROWS = 6
_COUNTED = ("requests", "failovers", "resumes", "rejections", "cancellations")


class Column(NamedTuple):
    """A column's head, and from which width of the terminal on it is shown."""

    name: str
    from_width: int = 0
    is_number: bool = True


def screen(seen: Snapshot | Trouble, width: int, height: int | None = None) -> RenderableType:
    """Everything, or what `height` lines have room for: replicas are left out before anything else."""
    if isinstance(seen, Trouble):
        return _verdict(seen.verdict)
    parts: list[RenderableType] = [_verdict(seen.verdict), _facts(seen), _models(seen.models, width)]
    decided = [model for model in seen.models if model.decisions]
    if decided:
        parts.append(_decisions(decided, seen.at_ms))
    if seen.dead:
        parts.append(_dead(seen))
    used = 12 + len(seen.verdict.reasons) + len(seen.models) + len(seen.pods) + 4 * bool(seen.dead) + 4 * bool(decided)
    rows = None if height is None else max(_FEW_ROWS, height - used)
    return Group(*parts, _replicas(seen, width, rows), _pods(seen, width))


def _verdict(verdict: Verdict) -> Text:
    said = Text(_WORDS[verdict.state], _STYLES[verdict.state])
    for reason in verdict.reasons:
        said.append("\n  " + reason.text, _STYLES[reason.state].removeprefix("bold "))
    return said


def _facts(seen: Snapshot) -> Text:
    """What happened over the last minutes, and since the processes that are present began."""
    rate = sum(model.tokens_per_s for model in seen.models)
    said = Text(f"{rate:,.0f} tokens/s, {sum(pod.streams for pod in seen.pods)} open streams; ", "dim")
    counts = (f"{name} {_sum(getattr(seen.recent, name))} ({_sum(getattr(seen.total, name))})" for name in _COUNTED)
    return said.append(f"last {seen.window_s / 60:.0f} min (since the start): {', '.join(counts)}")


def _models(models: Sequence[ModelNow], width: int) -> Table:
    columns = [
        Column("model", is_number=False),
        Column("ready"),
        Column("waiting"),
        Column("oldest", _MIDDLE),
        Column("running"),
        Column("tok/s"),
        Column("TTFT p50", _WIDE),
        Column("TTFT p95", _MIDDLE),
        Column("within", _MIDDLE),
        Column("ITL p50", _WIDE),
        Column("ITL p95", _WIDE),
        Column("within", _WIDE),
    ]
    table, shown = _table(columns, width)
    for model in models:
        waits = " ".join(f"{band} {count}" for band, count in model.waiting.items() if count)
        cells = (
            model.name,
            f"{model.states['ready']}/{model.wanted}",
            waits if width >= _MIDDLE and waits else str(_sum(model.waiting)),
            f"{model.oldest_s:.1f} s" if waits else "",
            f"{model.running}/{model.slots}",
            f"{model.tokens_per_s:,.0f}",
            _ms(model.ttft.p50_ms),
            _ms(model.ttft.p95_ms),
            _met(model.ttft, model.attainment),
            _ms(model.itl.p50_ms),
            _ms(model.itl.p95_ms),
            _met(model.itl, model.attainment),
        )
        _add(table, cells, shown)
    return table


def _decisions(models: Sequence[ModelNow], at_ms: int) -> Table:
    table, shown = _table([Column("autoscaler", 0, False), Column("ago"), Column("", 0, False)], _WIDE)
    for model in models:
        for each in model.decisions[:3]:
            change = f"{each.before} to {each.target}" if each.direction != "hold" else str(each.target)
            advice = " (advice)" if each.is_advice else ""
            said = f"{each.direction} {change}{advice}: {each.reason}"
            _add(table, (model.name, _ago(at_ms - each.at_ms), said), shown)
    return table


def _dead(seen: Snapshot) -> Table:
    table, shown = _table(
        [Column("dead letter", 0, False), Column("model", 0, False), Column("ago"), Column("of")], _WIDE
    )
    for letter in seen.dead[:3]:
        _add(table, (letter.job, letter.model, _ago(seen.at_ms - letter.died_ms), letter.died_of), shown)
    return table


def _replicas(seen: Snapshot, width: int, rows: int | None) -> RenderableType:
    columns = [
        Column("replica", 0, False),
        Column("model", _MIDDLE, False),
        Column("state", 0, False),
        Column("running"),
        Column("batch", _MIDDLE),
        Column("KV", _MIDDLE),
        Column("tok/s"),
        Column("pid", _WIDE),
    ]
    table, shown = _table(columns, width)
    if not seen.replicas:
        return Text("replicas: none", "dim")
    first = sorted(seen.replicas, key=lambda each: (each.state == "ready", -each.running))[:rows]
    for each in first:
        state = f"{each.state} {each.progress}".strip()
        work = f"{each.running}/{each.slots}"
        batch, kv_used = ("" if value is None else str(value) for value in (each.batch, each.kv_percent))
        rate = f"{each.tokens_per_s:,.0f}"
        _add(table, (each.id, each.model, state, work, batch, kv_used and f"{kv_used} %", rate, str(each.pid)), shown)
    left = len(seen.replicas) - len(first)
    return Group(table, Text(f"and {left} replicas more", "dim")) if left else table


def _pods(seen: Snapshot, width: int) -> Table:
    columns = [Column("pod", 0, False), Column("streams"), Column("requests"), Column("pid", _MIDDLE)]
    table, shown = _table(columns, width)
    for pod in seen.pods:
        _add(table, (pod.url or pod.id, str(pod.streams), str(pod.requests), str(pod.pid)), shown)
    return table


def _table(columns: Sequence[Column], width: int) -> tuple[Table, list[bool]]:
    shown = [width >= column.from_width for column in columns]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column, is_shown in zip(columns, shown, strict=True):
        if is_shown:
            table.add_column(
                column.name, justify="right" if column.is_number else "left", no_wrap=True, overflow="ellipsis"
            )
    return table, shown


def _add(table: Table, cells: Sequence[str | Text], shown: Sequence[bool]) -> None:
    """A row; texts are never read as markup."""
    kept = (cell for cell, is_shown in zip(cells, shown, strict=True) if is_shown)
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in kept))


def _met(seen: Latency, attainment: float) -> Text:
    if seen.met is None:
        return Text("")
    return Text(f"{seen.met:.1%}", "green" if seen.met >= attainment else "yellow")


def _ms(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} ms" if value < 10_000 else f"{value / 1000:.1f} s"


def _ago(ms: int) -> str:
    seconds = max(0, ms) / 1000
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _sum(counts: Mapping[str, int]) -> int:
    return sum(counts.values())
