"""The load: many streams at once, each checked token by token.

Closed (a number of streams, each of which asks again when it is done) or open (requests arrive at random, whatever is
still running). A client that cuts its connection after some tokens and goes on at the next pod can be part of it.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from headrace.cli.load_plan import Plan, Totals
from headrace.cli.load_request import Request, Target

_SILENCE_S = 60.0


class Load:
    """One run of a plan. `totals` may be looked at while it runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.totals = Totals()
        self.targets = [_target(url) for url in plan.urls]
        self._open: set[Request] = set()
        self._random = random.Random(plan.seed)

    async def run(self) -> Totals:
        began, cpu = time.monotonic(), time.process_time()
        watch = asyncio.create_task(self._end_silent(), name="silence")
        try:
            await (self._run_open() if self.plan.streams is None else self._run_closed(self.plan.streams))
        finally:
            watch.cancel()
        self.totals.elapsed_s = time.monotonic() - began
        self.totals.client_cpu_s = time.process_time() - cpu
        return self.totals

    def _numbers(self) -> Iterator[int]:
        """The requests that may still begin."""
        plan, until = self.plan, time.monotonic() + (self.plan.duration_s or float("inf"))
        for number in itertools.count() if plan.requests is None else range(plan.requests):
            if time.monotonic() >= until:
                return
            yield number

    async def _run_closed(self, streams: int) -> None:
        numbers = self._numbers()

        async def stream() -> None:
            for number in numbers:
                await self._request(number, time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(stream())

    async def _run_open(self) -> None:
        """Arrivals are fixed beforehand: a slow server does not slow them, and waiting for it counts as its time."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in self._numbers():
                due += self._random.expovariate(self.plan.rate)
                await asyncio.sleep(due - time.monotonic())
                group.create_task(self._request(number, due))

    async def _request(self, number: int, due: float) -> None:
        request = Request(self.plan, self.totals, self.targets, number, due)
        self._open.add(request)
        try:
            await request.run()
        finally:
            self._open.discard(request)

    async def _end_silent(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for request in list(self._open):
                if time.monotonic() - request.heard_at > _SILENCE_S:
                    request.fail("silent")


def _target(url: str) -> Target:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError(f"{url!r}: the load generator speaks plain http, as in http://127.0.0.1:8080")
    return parts.hostname, parts.port or 80
