"""What is done to the deployment: each fault by its name, and which of them comes next."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from bench.chaos_stream import Stream
from bench.chaos_world import LEASE_S, World

_CUT_MAX_S = 3.0
_HINTS_S = 2.0
_TAIL_BYTES = 64 * 1024


class Faults:
    """Makes faults one after another; `running` answers the streams that are open now."""

    def __init__(self, world: World, choice: random.Random, running: Callable[[], list[Stream]], *, tail: bool) -> None:
        self.made: Counter[str] = Counter()
        self._world = world
        self._choice = choice
        self._running = running
        self._cancels: set[asyncio.Task[None]] = set()
        self._kinds: list[Callable[[], Awaitable[None]]] = [
            self.kill_pod,
            self.kill_worker,
            self.drain_worker,
            self.pause_worker,
            self.kill_valkey,
            self.cut_redis,
            self.hang_redis,
            self.drop_hints,
            self.cut_clients,
            self.cancel_streams,
        ]
        if tail:
            self._kinds += [self.lose_tail] * 3
        self._deck: list[Callable[[], Awaitable[None]]] = []

    async def next(self) -> None:
        """One fault, of a kind that was not there since all others have been."""
        if not self._deck:
            self._deck = self._choice.sample(self._kinds, len(self._kinds))
        kind = self._deck.pop()
        self.made[kind.__name__] += 1
        await kind()

    async def settle(self) -> None:
        await asyncio.gather(*self._cancels)

    async def kill_pod(self) -> None:
        self._choice.choice(self._world.pods).signal(signal.SIGKILL)

    async def kill_worker(self) -> None:
        self._choice.choice(self._world.workers).signal(signal.SIGKILL)

    async def drain_worker(self) -> None:
        self._choice.choice(self._world.workers).signal(signal.SIGTERM)

    async def pause_worker(self) -> None:
        """Past its lease: another has its jobs when it wakes."""
        worker = self._choice.choice(self._world.workers)
        worker.signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S * self._choice.uniform(1.2, 3.0))
        worker.signal(signal.SIGCONT)

    async def kill_valkey(self) -> None:
        await self._world.kill_valkey(self._choice.uniform(0.0, 1.0))

    async def lose_tail(self) -> None:
        await self._world.kill_valkey(self._choice.uniform(0.0, 0.5), cut_bytes=self._choice.randint(1, _TAIL_BYTES))

    async def cut_redis(self) -> None:
        await self._world.proxy.cut_for(self._choice.uniform(0.0, _CUT_MAX_S))

    async def hang_redis(self) -> None:
        """Every connection there is says nothing any more, as when a host has vanished; new ones are well."""
        self._world.proxy.silence()

    async def drop_hints(self) -> None:
        self._world.proxy.is_dropping_hints = True
        await asyncio.sleep(self._choice.uniform(0.3, _HINTS_S))
        self._world.proxy.is_dropping_hints = False

    async def cut_clients(self) -> None:
        for stream in self._running():
            if self._choice.random() < 0.5:
                stream.cut()

    async def cancel_streams(self) -> None:
        running = self._running()
        for stream in self._choice.sample(running, min(3, len(running))):
            self._cancels.add(asyncio.create_task(stream.cancel()))
