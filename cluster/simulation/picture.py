"""Pictures of sweeps and runs. matplotlib is an extra: without it a ConfigError says what to install."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.broker.errors import ConfigError
from headrace.cluster.simulation.fleet import ReplicaModel, Run
from headrace.cluster.simulation.report import by_policy
from headrace.cluster.simulation.sweep import Row, front

_BIN_S = 10.0
_COLOURS = {"headrace": "#c0392b", "oracle": "#000000", "static": "#888888"}
_FLOOR = 0.9


def pareto(rows: Sequence[Row], title: str, file: Path) -> None:
    """Replica-hours against the share that missed an SLO, each policy's front as a line."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6.4, 4.2), dpi=80)
    for name, found in by_policy(rows).items():
        best = [row for row in front(found) if row.attainment >= _FLOOR]
        if not best:
            continue
        missed = [max(1 - row.attainment, 1e-4) for row in best]
        style = {"linewidth": 2.2, "zorder": 5} if name == "headrace" else {"linewidth": 1.0}
        axes.plot(
            [row.replica_hours for row in best], missed, marker=".", label=name, color=_COLOURS.get(name), **style
        )
    axes.set_yscale("log")
    axes.set_xscale("log")
    axes.invert_yaxis()
    axes.set_xlabel("replica-hours")
    axes.set_ylabel("share of requests that missed an SLO")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
    _save(pyplot, figure, file)


def timeline(run: Run, model: ReplicaModel, title: str, file: Path) -> None:
    """Replicas and demand over time, and TTFT below it."""
    pyplot = _pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7.2, 4.6), dpi=80)
    trace = run.trace
    bins = int(trace.span_s / _BIN_S) + 1
    at = np.arange(bins) * _BIN_S
    index = (trace.arrival_s / _BIN_S).astype(int)
    prefill = np.bincount(index, weights=trace.input_tokens, minlength=bins) / model.prefill_tokens_per_s
    decode = np.bincount(index, weights=trace.output_tokens, minlength=bins) * model.step_s / model.slots
    upper.fill_between(at, (prefill + decode) / _BIN_S, color="#bbbbbb", label="demand (prefill and decode)")
    begin, end = (np.array(side) for side in zip(*run.lives, strict=True))
    upper.step(at, [((begin <= now) & (end > now)).sum() for now in at], color="#c0392b", label="replicas paid for")
    times, numbers = zip(*run.targets, strict=True)
    upper.step([*times, trace.span_s], [*numbers, numbers[-1]], where="post", linewidth=0.8, label="wanted")
    upper.set_ylabel("replicas")
    upper.legend(fontsize=7, loc="upper left")
    met = run.is_met
    lower.scatter(trace.arrival_s[met], np.minimum(run.ttft_s[met], 100), s=1, color="#2980b9", label="SLO met")
    lower.scatter(trace.arrival_s[~met], np.minimum(run.ttft_s[~met], 100), s=2, color="#c0392b", label="missed")
    lower.set_yscale("log")
    lower.set_ylabel("TTFT, s")
    lower.set_xlabel("s")
    lower.legend(fontsize=7, markerscale=4, loc="upper right")
    upper.set_title(title, fontsize=10)
    _save(pyplot, figure, file)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--pictures: needs matplotlib: pip install 'headrace[simulate]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(pyplot: Any, figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
