"""What a process has counted, in a form that can be added up over processes: what `/ops` and `headrace top` show.

The numbers are those of the process's own metrics, read once a second and published with its presence, both since the
process began and over the last minutes. So whoever sums what is present gets what Prometheus gets from the same
processes, at once and without a history of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct
from prometheus_client.samples import Sample

from headrace.broker import metrics

WINDOW_S = 300.0
"""What `recent` covers; less while a process is younger."""
_GRAIN_S = 5.0
_RATE_S = 5.0
FIELD = "figures"
"""Of the presence of a replica or a pod."""


class Histogram(Struct, array_like=True, frozen=True):
    """Counts in each bucket of a metric (not summed up; the last is above all bounds), and the sum of what was seen."""

    counts: list[int] = []
    sum_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


class Figures(Struct, omit_defaults=True, frozen=True):
    """Counts that only grow. A replica has the first group, a pod the second; the words are those of the labels."""

    ttft: Histogram = Histogram()
    tpot: Histogram = Histogram()
    tokens: dict[str, int] = {}
    failovers: dict[str, int] = {}
    cancellations: dict[str, int] = {}

    requests: dict[str, int] = {}
    """By outcome."""
    resumes: dict[str, int] = {}
    rejections: dict[str, int] = {}

    def __add__(self, other: Figures) -> Figures:
        return _combined(self, other, 1)

    def __sub__(self, other: Figures) -> Figures:
        """What has come since `other` was read."""
        return _combined(self, other, -1)


class Published(Struct, omit_defaults=True, frozen=True):
    """What a process says of itself, as JSON in the field `FIELD` of its presence."""

    total: Figures = Figures()
    recent: Figures = Figures()
    tokens_per_s: float = 0.0


_decoder = msgspec.json.Decoder(Published)


def published(about: Mapping[str, str]) -> Published:
    """What a presence says; nothing if it is of a build that says it otherwise."""
    try:
        return _decoder.decode(about.get(FIELD, "{}"))
    except msgspec.DecodeError:
        return Published()


def of_replica(model: str) -> Figures:
    """This process's figures as a replica of a model."""
    return Figures(
        ttft=histogram(metrics.TIME_TO_FIRST_TOKEN, [model]),
        tpot=histogram(metrics.TIME_PER_OUTPUT_TOKEN, [model]),
        tokens=counts(metrics.TOKENS, "kind", [model]),
        failovers=counts(metrics.FAILOVERS, "outcome"),
        cancellations=counts(metrics.CANCELLATIONS, "cause"),
    )


def of_pod() -> Figures:
    """This process's figures as a pod."""
    return Figures(
        requests=counts(metrics.REQUESTS, "outcome"),
        resumes=counts(metrics.RESUMES, "outcome"),
        rejections=counts(metrics.REJECTIONS, "reason"),
    )


class Recorder:
    """Keeps what was read over the last minutes, so that a process can say how it is and not only what it has done."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, Figures]] = deque()
        self._made: deque[tuple[float, int]] = deque()

    def publish(self, at_s: float, total: Figures) -> dict[str, str]:
        """The field of the presence, at this time of a clock that only goes forward."""
        self._made.append((at_s, total.tokens.get("completion", 0)))
        while len(self._made) > 2 and self._made[1][0] <= at_s - _RATE_S:
            self._made.popleft()
        if not self._past or at_s - self._past[-1][0] >= _GRAIN_S:
            self._past.append((at_s, total))
        while len(self._past) > 1 and self._past[1][0] <= at_s - WINDOW_S:
            self._past.popleft()
        said = Published(total, total - self._past[0][1], self._rate())
        return {FIELD: msgspec.json.encode(said).decode()}

    def _rate(self) -> float:
        (then_s, before), (now_s, now) = self._made[0], self._made[-1]
        return round(max(0, now - before) / (now_s - then_s), 1) if now_s > then_s else 0.0


def bounds(metric: metrics.Metric) -> list[float]:
    """The upper bounds of a histogram's buckets, in seconds, the last one infinite."""
    found = [float(bound) for bound in metric._kwargs["buckets"]]  # the library has no other name for them
    return found if math.isinf(found[-1]) else [*found, math.inf]


def quantile_s(histogram: Histogram, uppers: Sequence[float], share: float) -> float | None:
    """A quantile as Prometheus's `histogram_quantile` says it; None of nothing.

    Within a bucket values are taken to lie evenly; above the last bound, that bound is what is known.
    """
    rank, below, lower = share * histogram.count, 0, 0.0
    for count, upper in zip(histogram.counts, uppers, strict=False):
        if count and below + count >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return None


def share_within(histogram: Histogram, uppers: Sequence[float], limit_s: float) -> float | None:
    """The share of what was at most `limit_s`, by the same rule; None of nothing."""
    below, lower = 0.0, 0.0
    for count, upper in zip(histogram.counts, uppers, strict=False):
        if upper > limit_s:
            part = 0.0 if math.isinf(upper) else (limit_s - lower) / (upper - lower)
            return (below + count * part) / histogram.count if histogram.count else None
        below, lower = below + count, upper
    return 1.0 if histogram.count else None


def _combined(one: Figures, other: Figures, sign: int) -> Figures:
    def numbers(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
        return {word: n for word in {**a, **b} if (n := a.get(word, 0) + sign * b.get(word, 0))}

    def buckets(a: Histogram, b: Histogram) -> Histogram:
        width = max(len(a.counts), len(b.counts))
        rows = ([*each.counts, *[0] * (width - len(each.counts))] for each in (a, b))
        return Histogram([x + sign * y for x, y in zip(*rows, strict=True)], a.sum_s + sign * b.sum_s)

    return Figures(
        buckets(one.ttft, other.ttft),
        buckets(one.tpot, other.tpot),
        *(numbers(getattr(one, name), getattr(other, name)) for name in Figures.__struct_fields__[2:]),
    )


def counts(counter: metrics.Metric, label: str, models: Sequence[str] | None = None) -> dict[str, int]:
    """A counter of this process by one of its labels, summed over the others: of these models, or of all."""
    found: dict[str, int] = {}
    for sample in _samples(counter, models):
        if sample.name.endswith("_total"):
            word = sample.labels[label]
            found[word] = found.get(word, 0) + int(sample.value)
    return {word: count for word, count in found.items() if count}


def histogram(metric: metrics.Metric, models: Sequence[str]) -> Histogram:
    """A histogram of this process, summed over these models and all other labels."""
    at_most: dict[float, float] = {}
    sum_s = 0.0
    for sample in _samples(metric, models):
        if sample.name.endswith("_bucket"):
            bound = float(sample.labels["le"])
            at_most[bound] = at_most.get(bound, 0.0) + sample.value
        elif sample.name.endswith("_sum"):
            sum_s += sample.value
    summed = [int(at_most[bound]) for bound in sorted(at_most)]
    each = [count - before for count, before in zip(summed, [0, *summed], strict=False)]
    return Histogram(each, round(sum_s, 6)) if any(each) else Histogram()


def _samples(metric: metrics.Metric, models: Sequence[str] | None) -> Iterator[Sample]:
    for family in metric.collect():
        for sample in family.samples:
            if models is None or sample.labels.get("model") in models:
                yield sample
