"""What a token costs at the load points of docs/performance.md, through the real path.

`python bench/points.py --points 1x20,10x20,100x20,1000x20,100x0,1000x0` (streams x milliseconds between tokens) starts
Valkey (AOF everysec), pods and workers of its own, and prints a JSON line for each point: CPU microseconds per token by
process, TTFT and ITL added over the engine's own schedule, and memory. Exit status 1 if a text is not the oracle's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

import redis.asyncio as redis
import yaml

from bench import points_client
from bench.points_client import Load, Seen
from headrace.broker.embedded import EmbeddedServer, die_with_parent
from headrace.broker.tasks import loop_factory
from headrace.cli.processes import Usage, usage
from headrace.workers.engines.scripted import oracle

MODEL = "scripted"
POINTS = "1x20,10x20,100x20,1000x20,100x0,1000x0"


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


class Deployment:
    """Valkey, pods and bare workers, each a process; `pids` by role."""

    def __init__(self, folder: Path, point: Point, pods: int, workers: int) -> None:
        self.ports = _free_ports(pods)
        self.pids: dict[str, list[int]] = {"valkey": [], "pod": [], "worker": []}
        self._valkey = EmbeddedServer(str(folder))
        self.url = self._valkey.url
        self._folder = folder
        self._workers = workers
        self._children: list[asyncio.subprocess.Process] = []
        model = {
            "name": MODEL,
            "engine": "scripted",
            "tokens_per_s": 1000 / point.interval_ms if point.interval_ms else 0,
            "slots": max(64, 2 * point.streams),
            "cpus": 0.1,
        }
        (folder / "headrace.yaml").write_text(yaml.safe_dump({"models": [model], "redis": {"url": self.url}}), "utf-8")

    async def start(self) -> None:
        await self._valkey.start()
        assert self._valkey.process is not None
        self.pids["valkey"] = [self._valkey.process.pid]
        self.pids["pod"] = [await self._start("api", "--port", str(port)) for port in self.ports]
        self.pids["worker"] = [await self._start("worker") for _ in range(self._workers)]
        for port in self.ports:
            await _until_served(port)

    async def _start(self, *arguments: str) -> int:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with (self._folder / f"{len(self._children)}.log").open("wb") as output:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "headrace.cli.main", *arguments, "--config", str(self._folder / "headrace.yaml"),
                stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                preexec_fn=die_with_parent, env={**clean, "HEADRACE_DATA": str(self._folder)},
            )  # fmt: skip
        self._children.append(child)
        return child.pid

    async def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        await asyncio.gather(*(child.wait() for child in self._children))
        await self._valkey.stop()


@contextlib.asynccontextmanager
async def deployed(point: Point, pods: int, workers: int) -> AsyncIterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        world = Deployment(Path(folder), point, pods, workers)
        try:
            await world.start()
            yield world
        finally:
            await world.close()


async def measure(point: Point, chosen: argparse.Namespace) -> dict[str, object]:
    """Run one point: warm up, then look at all processes twice, a window apart, while the streams run."""
    async with deployed(point, chosen.pods, chosen.workers) as world:
        load = Load(
            point.streams, chosen.tokens, world.ports, "/v1/chat/completions", MODEL, max(1.0, point.streams / 400)
        )
        idle = _rss(world)
        began = time.perf_counter()
        since, until = began + load.spread_s + 2.0, began + load.spread_s + 2.0 + chosen.seconds
        running = asyncio.create_task(points_client.run(load, until))
        await asyncio.sleep(since - time.perf_counter())
        first, own = _used(world), time.process_time()
        bytes_at = await _redis_bytes(world.url)
        await asyncio.sleep(until - time.perf_counter())
        now = time.perf_counter()
        second, own = _used(world), time.process_time() - own
        loaded = _rss(world)
        seen = await running
        return _told(point, _Window(since, now, first, second, own), seen, chosen.tokens) | {
            "pod_mib_per_1000_streams": round((loaded["pod"] - idle["pod"]) / (1 << 20) / point.streams * 1000, 1),
            "redis_bytes": bytes_at,
        }


@dataclass(frozen=True)
class _Window:
    """From when to when was measured (perf_counter), and the CPU seconds of each role at both ends."""

    since: float
    until: float
    first: dict[str, float]
    second: dict[str, float]
    client_s: float


def _told(point: Point, window: _Window, seen: Sequence[Seen], tokens_each: int) -> dict[str, object]:
    counted = [(at, count) for each in seen for at, count in each.arrivals if window.since <= at < window.until]
    tokens = sum(count for _, count in counted)
    cpu = {role: (window.second[role] - window.first[role]) * 1e6 / max(1, tokens) for role in window.first}
    began = [each for each in seen if window.since <= each.asked_at < window.until and each.arrivals]
    ttft = [(each.arrivals[0][0] - each.asked_at) * 1000 for each in began]
    itl = [
        (later[0] - earlier[0]) * 1000 - point.interval_ms
        for each in seen
        for earlier, later in zip(each.arrivals, each.arrivals[1:], strict=False)
        if window.since <= earlier[0] and later[0] < window.until
    ]
    cpu["all"] = sum(cpu.values())
    return {
        "point": str(point),
        "cpu_us_per_token": {role: round(spent, 1) for role, spent in cpu.items()},
        "client_us_per_token": round(window.client_s * 1e6 / max(1, tokens), 1),
        "tokens_per_s": round(tokens / (window.until - window.since)),
        "requests": len(seen),
        "ttft_added_ms": _quantiles(ttft),
        "itl_added_ms": _quantiles(itl),
        "wrong": sum(not _is_right(each, tokens_each) for each in seen),
    }


def _is_right(seen: Seen, tokens: int) -> bool:
    return seen.said() == b"".join(b" %08x" % oracle(seen.text, 0, 0, index) for index in range(tokens))


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values) or [0.0]
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 2) for q in (50, 99)}


def _used(world: Deployment) -> dict[str, float]:
    return {role: sum(each.cpu_s for each in _usage(pids)) for role, pids in world.pids.items()}


def _rss(world: Deployment) -> dict[str, int]:
    return {role: sum(each.rss_bytes for each in _usage(pids)) for role, pids in world.pids.items()}


def _usage(pids: list[int]) -> list[Usage]:
    return list(usage(pids).values())


async def _redis_bytes(url: str) -> int:
    async with redis.Redis.from_url(url, protocol=2) as client:
        return int((await client.info("memory"))["used_memory"])


async def _until_served(port: int) -> None:
    """Ask for one token until it comes: the pod is up, and a worker is there."""
    seen = Seen("", 0.0)
    while not seen.tokens:
        seen = Seen("is anybody there", 0.0)
        with contextlib.suppress(OSError):
            await points_client._exchange(Load(1, 1, [port], "/v1/chat/completions", MODEL, 0.0), seen, port)
        await asyncio.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def main() -> int:
    options = argparse.ArgumentParser(prog="points", description=__doc__)
    options.add_argument("--points", default=POINTS)
    options.add_argument("--seconds", type=float, default=8.0, help="how long each point is measured")
    options.add_argument("--tokens", type=int, default=200, help="tokens of each answer")
    options.add_argument("--pods", type=int, default=1)
    options.add_argument("--workers", type=int, default=1)
    chosen = options.parse_args()
    wrong = 0
    for each in chosen.points.split(","):
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            told = runner.run(measure(Point.of(each), chosen))
        wrong += int(str(told["wrong"]))
        print(json.dumps(told), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
