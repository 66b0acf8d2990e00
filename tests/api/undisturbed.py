"""Whoever else is served meanwhile, while something hostile is tried."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator

from tests.api.deployment import Deployment
from tests.support import eventually

GAP_S = 0.5
"""The longest that another stream may stand still; the machine of the tests may take three times as long."""


@contextlib.asynccontextmanager
async def undisturbed(up: Deployment) -> AsyncIterator[None]:
    """Another stream goes on meanwhile, at its pace; it is the only job that there ever was."""
    times: list[float] = []

    async def read() -> None:
        async with up.open(max_tokens=100_000) as opened:
            async for _ in opened.response.aiter_raw():
                times.append(time.monotonic())

    reading = asyncio.create_task(read())
    await eventually(lambda: len(times) > 5)
    seen = len(times)
    try:
        yield
        await eventually(lambda: len(times) > seen + 5)
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
    assert max(after - before for before, after in itertools.pairwise(times)) < 3 * GAP_S
    assert len(up.recorded.told) == 1, "a hostile request was enqueued"
