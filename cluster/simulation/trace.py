"""Traces: when requests arrive, how long their prompts are and how much is generated. From files, or made up."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.broker.errors import ConfigError

BLOCK_TOKENS = 512
"""Of the blocks that Mooncake's traces name."""

_ARRIVAL = ("arrival_s", "arrival", "timestamp", "time")
_INPUT = ("input_tokens", "contexttokens", "input_length", "input", "prompt_tokens", "request tokens")
_OUTPUT = ("output_tokens", "generatedtokens", "output_length", "output", "completion_tokens", "response tokens")


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. Arrivals are seconds from the first one; every request makes at least a token.

    `blocks` name the prompts' blocks of `BLOCK_TOKENS` tokens, each together with all before it; empty: not known.
    """

    name: str
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    blocks: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def span_s(self) -> float:
        return float(self.arrival_s[-1])

    def scaled(self, times: int, seed: int = 0) -> Trace:
        """So many times the rate: copies, each turned by a random part of the span, so that bursts do not coincide.

        A copy's own shape is kept; the sum is smoother than one copy, as a larger deployment's load is.
        """
        if times == 1:
            return self
        random, span = np.random.default_rng(seed), self.span_s
        shifts = np.concatenate([[0.0], random.uniform(0, span, times - 1)])
        arrivals = np.concatenate([(self.arrival_s + shift) % span for shift in shifts])
        order = np.argsort(arrivals, kind="stable")
        inputs, outputs = np.tile(self.input_tokens, times), np.tile(self.output_tokens, times)
        return Trace(f"{self.name} x{times}", arrivals[order], inputs[order], outputs[order], self._copies(order))

    def _copies(self, order: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
        """The blocks of scaled requests: each copy has prompts of its own."""
        if not self.blocks:
            return ()
        size, names = len(self), 1 + max(max(blocks) for blocks in self.blocks)
        return tuple(tuple(name + index // size * names for name in self.blocks[index % size]) for index in order)


def load(where: str) -> Trace:
    """A file (.csv with a header, or .jsonl), or `steady`, `ramp`, `step` or `square`; raises ConfigError."""
    if where in SYNTHETIC:
        return SYNTHETIC[where](0)
    path = Path(where)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows: Iterable[dict[str, Any]] = (
                (json.loads(line) for line in file if line.strip())
                if path.suffix == ".jsonl"
                else csv.DictReader(file, skipinitialspace=True)
            )
            return _from_rows(path, rows)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: is not a trace of arrival, input tokens, output tokens: {error}") from error


def _from_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Trace:
    arrivals, inputs, outputs, blocks = [], [], [], []
    for row in rows:
        fields = {name.strip().lower(): value for name, value in row.items() if name}
        arrivals.append(_pick(fields, _ARRIVAL))
        inputs.append(int(float(_pick(fields, _INPUT))))
        outputs.append(int(float(_pick(fields, _OUTPUT))))
        blocks.append(tuple(map(int, fields.get("hash_ids") or ())))
    if len(arrivals) < 2:
        raise ValueError("it has fewer than two requests")
    seconds = _seconds(arrivals, is_ms=path.suffix == ".jsonl")
    return of(path.stem, seconds, np.array(inputs), np.array(outputs), blocks if all(blocks) else ())


def _pick(fields: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in fields:
            return fields[name]
    raise ValueError(f"no column of {', '.join(names)}")


def _seconds(values: list[Any], *, is_ms: bool) -> NDArray[np.float64]:
    """Numbers are seconds (Mooncake's JSON lines: milliseconds), anything else is a date and time."""
    try:
        return np.array([float(value) for value in values]) / (1000.0 if is_ms else 1.0)
    except ValueError:
        # seven digits after the point are Azure's; datetime reads six
        times = [datetime.fromisoformat(str(value)[:26]) for value in values]
        return np.array([(time - times[0]).total_seconds() for time in times])


def of(
    name: str,
    arrival_s: NDArray[np.float64],
    inputs: NDArray[Any],
    outputs: NDArray[Any],
    blocks: Sequence[tuple[int, ...]] = (),
) -> Trace:
    """A trace of unordered requests; raises ValueError for what cannot be one."""
    if not np.all(np.isfinite(arrival_s)):
        raise ValueError("an arrival is not a number")
    order = np.argsort(arrival_s, kind="stable")
    at = arrival_s[order] - arrival_s[order[0]]
    if at[-1] <= 0:
        raise ValueError("all requests arrive at once")
    tokens_in, tokens_out = (np.maximum(each[order], 1).astype(np.int64) for each in (inputs, outputs))
    return Trace(name, at, tokens_in, tokens_out, tuple(blocks[index] for index in order) if blocks else ())


# -- made up ----------------------------------------------------------------------------------------------------------


def poisson(name: str, rates: list[tuple[float, float]], seed: int, tokens: tuple[int, int] = (1000, 200)) -> Trace:
    """Poisson arrivals whose rate goes in straight lines through (second, requests a second); lengths vary."""
    random = np.random.default_rng(seed)
    times, levels = np.array(rates).T
    expected = np.concatenate([[0.0], np.cumsum(np.diff(times) * (levels[1:] + levels[:-1]) / 2)])
    marks = np.cumsum(random.exponential(1.0, int(expected[-1] * 1.2) + 100))
    marks = marks[marks < expected[-1]]
    fine = np.linspace(times[0], times[-1], 20_000)
    level = np.interp(fine, times, levels)
    passed = np.concatenate([[0.0], np.cumsum(np.diff(fine) * (level[1:] + level[:-1]) / 2)])
    arrivals = np.interp(marks, passed, fine)
    inputs = random.lognormal(np.log(tokens[0]) - 0.32, 0.8, len(arrivals))
    outputs = random.lognormal(np.log(tokens[1]) - 0.32, 0.8, len(arrivals))
    return of(name, arrivals, np.minimum(inputs, 32_000), np.minimum(outputs, 4_000))


def _square(seed: int) -> Trace:
    half = [(0.0, 40.0), (30.0, 40.0), (30.001, 4.0), (59.999, 4.0)]
    return poisson("square", [(60.0 * turn + at, rate) for turn in range(60) for at, rate in half], seed)


SYNTHETIC: dict[str, Callable[[int], Trace]] = {
    "steady": lambda seed: poisson("steady", [(0, 30), (3600, 30)], seed),
    "ramp": lambda seed: poisson("ramp", [(0, 5), (600, 5), (3000, 60), (4200, 60), (6600, 5), (7200, 5)], seed),
    "step": lambda seed: poisson(
        "step", [(0, 10), (1800, 10), (1800.001, 40), (3600, 40), (3600.001, 10), (5400, 10)], seed
    ),
    "square": _square,
}
"""What `load` makes without a file, by name: seed in, trace out."""
