"""Limits and usage of `memory.MemoryBroker`: the counterparts of the hashes `spent` and `usage` and the set `slots`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from headrace.broker.errors import LimitReached
from headrace.broker.limits import Bucket, Limits, Standing
from headrace.broker.messages import Status, Usage
from headrace.broker.protocol import Admission

DAY_MS = 86_400_000
_EPSILON = 1e-6
_MINUTE_MS = 60_000


class Ended(Protocol):
    """A job, as far as its end is concerned."""

    ended: Status | None


@dataclass
class Spent:
    """What a key or an owner has of its limits, and its jobs and streams by when they must have ended."""

    requests: float = 0.0
    tokens: float = 0.0
    at_ms: int = 0
    day: int = 0
    today: int = 0
    jobs: dict[str, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)

    def decayed(self, limits: Limits, now: int) -> Spent:
        minutes, day = max(0, now - self.at_ms) / _MINUTE_MS, now // DAY_MS

        def left(level: float, limit: int | None) -> float:
            return max(0.0, level - minutes * limit) if limit else 0.0

        requests, tokens = left(self.requests, limits.requests_per_minute), left(self.tokens, limits.tokens_per_minute)
        return Spent(requests, tokens, now, day, self.today if self.day == day else 0, self.jobs, self.streams)


class Subject(NamedTuple):
    """A key or an owner."""

    kind: str
    name: str
    limits: Limits


class Accounts:
    """See the module. `find` tells whether a job is still there."""

    def __init__(self, find: Callable[[str], Ended | None]) -> None:
        self._find = find
        self._spent: dict[str, Spent] = {}
        self.usage: dict[int, dict[tuple[str, str], tuple[int, int, int]]] = {}
        """By day, then by model and owner: requests, tokens of prompts, tokens of answers."""

    def check(self, admission: Admission, now: int) -> None:
        """Raise LimitReached if a limit keeps the job out."""
        for subject in _subjects(admission):
            spent = self._of(subject, now)
            if found := self._breach(subject.limits, spent, admission, now):
                name, limit, retry_ms = found
                standing = self._standing(admission, now)
                raise LimitReached.of(subject.kind, name, limit, math.ceil(retry_ms), standing)

    def reserve(self, admission: Admission, now: int, until_ms: int) -> Standing:
        """Charge a job that was admitted; answers how the limits stand then."""
        for subject in _subjects(admission):
            spent = self._spent[subject.name] = self._of(subject, now)
            spent.requests += 1
            spent.tokens += admission.cost_tokens
            spent.today += admission.cost_tokens
            if subject.limits.max_jobs:
                spent.jobs[admission.job.id] = until_ms
            if subject.limits.max_streams and admission.view.stream:
                spent.streams[admission.job.id] = until_ms
        return self._standing(admission, now)

    def settle(self, admission: Admission, used: Usage, enqueued_ms: int, now: int) -> None:
        """A job has ended: note what it has used, and give back what was reserved beyond that."""
        day, who = self.usage.setdefault(now // DAY_MS, {}), (admission.job.model, admission.view.owner)
        requests, prompt, completion = day.get(who, (0, 0, 0))
        day[who] = requests + 1, prompt + used.prompt_tokens, completion + used.completion_tokens
        over = used.prompt_tokens + used.completion_tokens - admission.cost_tokens
        for subject in _subjects(admission):
            spent = self._spent.setdefault(subject.name, Spent())
            spent.jobs.pop(admission.job.id, None)
            spent.streams.pop(admission.job.id, None)
            spent.tokens = max(0.0, spent.tokens + over)
            if spent.day == enqueued_ms // DAY_MS:
                spent.today = max(0, spent.today + over)

    def _of(self, subject: Subject, now: int) -> Spent:
        return self._spent.get(subject.name, Spent()).decayed(subject.limits, now)

    def _breach(self, limits: Limits, spent: Spent, admission: Admission, now: int) -> tuple[str, int, float] | None:
        if (limit := limits.requests_per_minute) and (over := spent.requests + 1 - limit) > _EPSILON:
            return "requests_per_minute", limit, over / limit * _MINUTE_MS
        cost = admission.cost_tokens
        if (limit := limits.tokens_per_minute) and (over := spent.tokens + min(cost, limit) - limit) > _EPSILON:
            return "tokens_per_minute", limit, over / limit * _MINUTE_MS
        if (limit := limits.tokens_per_day) and spent.today + min(cost, limit) > limit:
            return "tokens_per_day", limit, (spent.day + 1) * DAY_MS - now
        if (limit := limits.max_jobs) and self._taken(spent.jobs, now) >= limit:
            return "max_jobs", limit, 1000
        if (limit := limits.max_streams) and admission.view.stream and self._taken(spent.streams, now) >= limit:
            return "max_streams", limit, 1000
        return None

    def _taken(self, places: dict[str, int], now: int) -> int:
        for job_id in list(places):
            job = self._find(job_id)
            if places[job_id] <= now or job is None or job.ended is not None:
                del places[job_id]
        return len(places)

    def _standing(self, admission: Admission, now: int) -> Standing:
        found = [(subject.limits, self._of(subject, now)) for subject in _subjects(admission)]
        requests = [_bucket(limits.requests_per_minute, spent.requests) for limits, spent in found]
        tokens = [_bucket(limits.tokens_per_minute, spent.tokens) for limits, spent in found]
        return Standing(_tighter(requests), _tighter(tokens))


def _bucket(limit: int | None, used: float) -> Bucket | None:
    return Bucket(limit, max(0, math.floor(limit - used)), math.ceil(used / limit * _MINUTE_MS)) if limit else None


def _tighter(buckets: list[Bucket | None]) -> Bucket | None:
    return min((bucket for bucket in buckets if bucket), key=lambda bucket: bucket.left, default=None)


def _subjects(admission: Admission) -> list[Subject]:
    found = admission.allowance
    if found is None:
        return []
    owner = admission.view.owner
    return [Subject("key", f"k:{found.key}", found.of_key), Subject("owner", f"o:{owner}", found.of_owner)]
