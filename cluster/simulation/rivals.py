"""The laws to beat, each as published, reduced to what decides about the number of replicas.

They see the same signals as ours and drive the same replicas behind the same queue, so that only the laws differ; of
what their own routers or gateways do nothing is here. Each has one main knob. Where a source leaves something open, the
choice is in the class's docstring.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from headrace.cluster.law import Signals


class Static:
    """N replicas, always."""

    period_s = 10.0
    wants_p90 = False

    def __init__(self, replicas: float) -> None:
        self._replicas = int(replicas)

    def decide(self, signals: Signals) -> int:
        return self._replicas


class _Delayed:
    """A change in one direction must be wanted for so long without pause; it is then made at once (Ray Serve)."""

    def __init__(self, up_s: float, down_s: float) -> None:
        self._delays = {1: up_s, -1: down_s}
        self._since: tuple[int, float] = (0, 0.0)

    def move(self, now: float, current: int, wanted: int) -> int:
        direction = (wanted > current) - (wanted < current)
        if direction != self._since[0]:
            self._since = direction, now
        if direction and now - self._since[1] >= self._delays[direction]:
            self._since = 0, now
            return wanted
        return current


class RayDefault:
    """Ray Serve's default policy: requests under way over `target_ongoing_requests` (the knob; 2 as shipped).

    Mean over the look-back of 30 s; up after 30 s, down after 600 s.
    """

    period_s = 1.0
    wants_p90 = False

    def __init__(self, target: float) -> None:
        self._target = target
        self._seen: deque[tuple[float, int]] = deque()
        self._delayed = _Delayed(30.0, 600.0)

    def _load(self, signals: Signals) -> float:
        self._seen.append((signals.at_s, signals.running + signals.waiting))
        while self._seen[0][0] < signals.at_s - 30:
            self._seen.popleft()
        return sum(count for _, count in self._seen) / len(self._seen)

    def decide(self, signals: Signals) -> int:
        wanted = max(1, math.ceil(self._load(signals) / self._target))
        return self._delayed.move(signals.at_s, signals.ready + signals.starting, wanted)


class RayAsync(RayDefault):
    """`AsyncInferenceAutoscalingPolicy`: ongoing requests (as above) and the queue's length, read every 10 s."""

    def __init__(self, target: float) -> None:
        super().__init__(target)
        self._queue, self._polled_s = 0, -math.inf

    def _load(self, signals: Signals) -> float:
        if signals.at_s - self._polled_s >= 10:
            self._queue, self._polled_s = signals.waiting, signals.at_s
        self._seen.append((signals.at_s, signals.running))
        while self._seen[0][0] < signals.at_s - 30:
            self._seen.popleft()
        return self._queue + sum(count for _, count in self._seen) / len(self._seen)


class _Hpa:
    """How a Kubernetes HPA moves: every 15 s; up to double, or by 4; down to the most wanted in the last 300 s."""

    def __init__(self, down_s: float = 300.0) -> None:
        self._down_s = down_s
        self._wanted: deque[tuple[float, int]] = deque()

    def move(self, now: float, current: int, wanted: int) -> int:
        self._wanted.append((now, wanted))
        while self._wanted[0][0] < now - self._down_s:
            self._wanted.popleft()
        if wanted > current:
            return min(wanted, max(2 * current, current + 4))
        return min(current, max(number for _, number in self._wanted))


class Keda:
    """KEDA on a list's length: waiting requests over the knob (5 as shipped), read every 30 s, moved by an HPA.

    At least one replica. The HPA's tolerance of 10 % is applied.
    """

    period_s = 15.0
    wants_p90 = False

    def __init__(self, length: float) -> None:
        self._length = length
        self._hpa = _Hpa()
        self._seen, self._polled_s = 0, -math.inf

    def decide(self, signals: Signals) -> int:
        if signals.at_s - self._polled_s >= 30:
            self._seen, self._polled_s = signals.waiting, signals.at_s
        current = max(1, signals.ready + signals.starting)
        wanted = max(1, math.ceil(self._seen / self._length))
        if abs(self._seen / self._length / current - 1) <= 0.1:
            wanted = current
        return self._hpa.move(signals.at_s, current, wanted)


class Kpa:
    """AIBrix's KPA, Knative's law: requests over the knob, as means over 60 s and, in panic, over 6 s.

    Panic begins at twice what is ready and lasts 60 s after the last time; it never goes down. Steps are at most
    tenfold up and by half down.
    """

    period_s = 2.0
    wants_p90 = False

    def __init__(self, target: float) -> None:
        self._target = target
        self._seen: deque[tuple[float, int]] = deque()
        self._panic_s = -math.inf
        self._panic_most = 0

    def decide(self, signals: Signals) -> int:
        now, ready = signals.at_s, max(1, signals.ready)
        self._seen.append((now, signals.running + signals.waiting))
        while self._seen[0][0] < now - 60:
            self._seen.popleft()
        stable = self._bounded(sum(count for _, count in self._seen) / len(self._seen), ready)
        short = [count for at, count in self._seen if at >= now - 6]
        panic = self._bounded(sum(short) / len(short), ready)
        if panic >= 2 * ready:
            self._panic_s = now
        if now - self._panic_s >= 60:
            self._panic_most = 0
            return stable
        self._panic_most = max(self._panic_most, panic, stable, signals.ready + signals.starting)
        return self._panic_most

    def _bounded(self, load: float, ready: int) -> int:
        return max(1, math.ceil(ready / 2), min(math.ceil(load / self._target), 10 * ready))


class Apa:
    """AIBrix's APA: the use of a replica, as a mean over 60 s, against the knob; up above 1.1 of it, down below 0.8.

    The metric is running requests a replica (published examples also take the share of KV room); steps at most double
    and halve.
    """

    period_s = 10.0
    wants_p90 = False

    def __init__(self, target: float) -> None:
        self._target = target
        self._seen: deque[tuple[float, float]] = deque()

    def decide(self, signals: Signals) -> int:
        now, current = signals.at_s, max(1, signals.ready + signals.starting)
        self._seen.append((now, (signals.running + signals.waiting) / max(1, signals.ready)))
        while self._seen[0][0] < now - 60:
            self._seen.popleft()
        ratio = sum(use for _, use in self._seen) / len(self._seen) / self._target
        if ratio > 1.1:
            return min(math.ceil(current * ratio), 2 * current)
        if ratio < 0.8:
            return max(1, math.ceil(current * ratio), math.floor(current / 2))
        return current


class LatencyLaw:
    """llm-d's latency law: P90 of TTFT (last minute) over its SLO, at most 2, as a mean over 45 s; up above the knob.

    0.55 as published, down below 0.40, or in that proportion of the knob. Replicas that are starting count as credit:
    their number is taken off what is missing. Read every 15 s. Up in proportion, down by one; an HPA's window of 300 s
    for down. Measured, not predicted latency, which the guide allows.
    """

    period_s = 5.0
    wants_p90 = True

    def __init__(self, up_at: float) -> None:
        self._up, self._down = up_at, up_at * 0.40 / 0.55
        self._seen: deque[tuple[float, float]] = deque()
        self._hpa = _Hpa()

    def decide(self, signals: Signals) -> int:
        now, current = signals.at_s, max(1, signals.ready + signals.starting)
        self._seen.append((now, min(signals.ttft_p90, 2.0)))
        while self._seen[0][0] < now - 45:
            self._seen.popleft()
        if now % 15 >= self.period_s:
            return current
        level = sum(share for _, share in self._seen) / len(self._seen)
        wanted = current
        if level > self._up:
            wanted = max(current, math.ceil(max(1, signals.ready) * level / self._up))
        elif level < self._down:
            wanted = max(1, current - 1)
        return max(1, self._hpa.move(now, current, wanted))


class TokenLaw:
    """llm-d's token law: seconds of prefill that wait, over the knob, or the KV room in use at 0.7; the larger.

    Read every 15 s, moved by an HPA. The prefill rate is the replica's own, as its guide has it measured beforehand.
    """

    period_s = 15.0
    wants_p90 = False

    def __init__(self, seconds: float, prefill_tokens_per_s: float = 20_000.0, kv_tokens: int = 400_000) -> None:
        self._seconds, self._rate, self._kv = seconds, prefill_tokens_per_s, kv_tokens
        self._hpa = _Hpa()

    def decide(self, signals: Signals) -> int:
        current = max(1, signals.ready + signals.starting)
        by_wait = math.ceil(signals.waiting_tokens / self._rate / self._seconds)
        by_room = math.ceil(signals.kv_tokens / (0.7 * self._kv))
        return self._hpa.move(signals.at_s, current, max(1, by_wait, by_room))


class Dynamo:
    """Dynamo's planner, both loops: every 180 s a floor from forecast load; every 5 s one more or one less above it.

    The forecast is the last interval's load, at a use of 1 / knob of a replica's prefill rate (its correction factor).
    One more if the TTFT expected of what waits is over the SLO, one less if it would be under 0.8 of it with one less,
    and nothing starts.
    """

    period_s = 5.0
    wants_p90 = False

    def __init__(self, spare: float, prefill_tokens_per_s: float = 20_000.0, slo_s: float = 0.5) -> None:
        self._spare, self._rate, self._slo_s = spare, prefill_tokens_per_s, slo_s
        self._floor, self._planned_s, self._tokens = 1, 0.0, 0

    def decide(self, signals: Signals) -> int:
        now, current = signals.at_s, max(1, signals.ready + signals.starting)
        if now - self._planned_s >= 180:
            load = (signals.arrived_tokens - self._tokens) / (now - self._planned_s) / self._rate
            self._floor = max(1, math.ceil(load * self._spare))
            self._planned_s, self._tokens = now, signals.arrived_tokens
        expected_s = signals.waiting_tokens / self._rate / max(1, signals.ready)
        moved = current
        if expected_s > self._slo_s and not signals.starting:
            moved = current + 1
        elif current > 1 and not signals.starting and expected_s * current / (current - 1) < 0.8 * self._slo_s:
            moved = current - 1
        return max(moved, self._floor)


RIVALS: dict[str, tuple[Callable[[float], object], tuple[float, ...]]] = {
    "static": (Static, tuple(float(n) for n in (*range(1, 17), 20, 24))),
    "ray": (RayDefault, (0.5, 1, 2, 4, 8, 16, 32)),
    "ray_async": (RayAsync, (0.5, 1, 2, 4, 8, 16, 32)),
    "keda": (Keda, (0.5, 1, 2, 5, 10, 20)),
    "kpa": (Kpa, (0.5, 1, 2, 4, 8, 16, 32)),
    "apa": (Apa, (0.5, 1, 2, 4, 8, 16, 32)),
    "llmd_latency": (LatencyLaw, (0.15, 0.25, 0.4, 0.55, 0.75, 1.0)),
    "llmd_token": (TokenLaw, (0.02, 0.05, 0.1, 0.25, 0.5, 1, 2)),
    "dynamo": (Dynamo, (1, 1.5, 2, 3, 4, 6)),
}
"""Policy name: how to make it from its knob, and the knobs of a sweep."""
