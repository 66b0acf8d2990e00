"""What a load point costs a set of processes: CPU by role, latency added to the source's own schedule, memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench import points_client
from bench.points_client import Load, Seen
from headrace.cli.processes import Usage, usage
from headrace.workers.engines.scripted import oracle

MODEL = "scripted"
PATH = "/v1/chat/completions"


@dataclass(frozen=True)
class Point:
    """A load: streams at once, and milliseconds between the tokens of each (0: as fast as it goes)."""

    streams: int
    interval_ms: int

    @classmethod
    def of(cls, text: str) -> Point:
        streams, interval_ms = text.split("x")
        return cls(int(streams), int(interval_ms))

    def __str__(self) -> str:
        return f"{self.streams}x{self.interval_ms}"


class World(Protocol):
    """What is measured: where it listens, and its processes by role."""

    ports: list[int]

    def pids(self) -> dict[str, list[int]]: ...


@dataclass(frozen=True)
class _Look:
    """CPU seconds and bytes of memory of each role, at a time (perf_counter)."""

    at: float
    cpu_s: dict[str, float]
    rss: dict[str, int]
    client_s: float


def _look(world: World) -> _Look:
    used: dict[str, list[Usage]] = {role: list(usage(pids).values()) for role, pids in world.pids().items()}
    return _Look(
        time.perf_counter(),
        {role: sum(each.cpu_s for each in rows) for role, rows in used.items()},
        {role: sum(each.rss_bytes for each in rows) for role, rows in used.items()},
        time.process_time(),
    )


async def measure(world: World, point: Point, tokens: int, seconds: float) -> dict[str, object]:
    """Warm up, then look twice, `seconds` apart, while the streams run; every text is compared with the oracle's."""
    load = Load(point.streams, tokens, world.ports, PATH, MODEL, max(1.0, point.streams / 400))
    idle = _look(world)
    since = time.perf_counter() + load.spread_s + 2.0
    running = asyncio.create_task(points_client.run(load, since + seconds))
    await asyncio.sleep(since - time.perf_counter())
    first = _look(world)
    await asyncio.sleep(since + seconds - time.perf_counter())
    second = _look(world)
    seen = await running
    mib = {role: round((second.rss[role] - idle.rss[role]) / (1 << 20) * 1000 / point.streams, 1) for role in idle.rss}
    return _told(point, first, second, seen) | {
        "mib_per_1000_streams": mib,
        "requests": len(seen),
        "wrong": sum(not _is_right(each, tokens) for each in seen),
    }


def _told(point: Point, first: _Look, second: _Look, seen: Sequence[Seen]) -> dict[str, object]:
    def is_in(at: float) -> bool:
        return first.at <= at < second.at

    tokens = max(1, sum(count for each in seen for at, count in each.arrivals if is_in(at)))
    cpu_us = {role: (second.cpu_s[role] - first.cpu_s.get(role, 0.0)) * 1e6 / tokens for role in second.cpu_s}
    cpu_us["all"] = sum(cpu_us.values())
    ttft = [(each.arrivals[0][0] - each.asked_at) * 1000 for each in seen if each.arrivals and is_in(each.asked_at)]
    itl = [
        (later[0] - earlier[0]) * 1000 - point.interval_ms
        for each in seen
        for earlier, later in zip(each.arrivals, each.arrivals[1:], strict=False)
        if is_in(earlier[0]) and is_in(later[0])
    ]
    return {
        "point": str(point),
        "cpu_us_per_token": {role: round(spent, 1) for role, spent in cpu_us.items()},
        "client_us_per_token": round((second.client_s - first.client_s) * 1e6 / tokens, 1),
        "tokens_per_s": round(tokens / (second.at - first.at)),
        "ttft_added_ms": _quantiles(ttft),
        "itl_added_ms": _quantiles(itl),
    }


def _is_right(seen: Seen, tokens: int) -> bool:
    return seen.said() == b"".join(b" %08x" % oracle(seen.text, 0, 0, index) for index in range(tokens))


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 2) for q in (50, 99)}


async def until_served(port: int, within_s: float = 120.0) -> None:
    """Ask for one token until it comes; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        seen = Seen("", 0.0)
        while not seen.tokens:
            seen = Seen("is anybody there", 0.0)
            with contextlib.suppress(OSError):
                await points_client.exchange(Load(1, 1, [port], PATH, MODEL, 0.0), seen, port)
            await asyncio.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
