"""What a token costs at the load points of docs/performance.md, through the real path.

`python bench/points.py --points 1x20,10x20,100x20,1000x20,100x0,1000x0` (streams x milliseconds between tokens) starts
Valkey (AOF everysec), pods and workers of its own, and prints a JSON line for each point: CPU microseconds per token by
process, TTFT and ITL added over the engine's own schedule, memory, and bytes of a live token in Redis. Exit status 1 if
a text is not the oracle's. `bench/peers.py` gives the same load to others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

import redis.asyncio as redis
import yaml

from bench.points_measure import MODEL, Point, free_ports, measure, until_served
from headrace.broker.embedded import EmbeddedServer, die_with_parent
from headrace.broker.tasks import loop_factory

POINTS = "1x20,10x20,100x20,1000x20,100x0,1000x0"


class Deployment:
    """Valkey, pods and bare workers, each a process."""

    def __init__(self, folder: Path, point: Point, pods: int, workers: int) -> None:
        self.ports = free_ports(pods)
        self.valkey = EmbeddedServer(str(folder), has_users=False)
        self._pids: dict[str, list[int]] = {}
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
        config = {"models": [model], "redis": {"url": self.valkey.url}}
        (folder / "headrace.yaml").write_text(yaml.safe_dump(config), "utf-8")

    def pids(self) -> dict[str, list[int]]:
        return self._pids

    async def start(self) -> None:
        await self.valkey.start()
        assert self.valkey.process is not None
        self._pids["valkey"] = [self.valkey.process.pid]
        self._pids["pod"] = [await self._start("api", "--port", str(port)) for port in self.ports]
        self._pids["worker"] = [await self._start("worker") for _ in range(self._workers)]
        for port in self.ports:
            await until_served(port)

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

    async def bytes_per_live_token(self) -> float:
        """Redis's memory of the logs that are there now, per token in them."""
        async with redis.Redis.from_url(self.valkey.url, protocol=2) as client:
            used = tokens = 0
            async for key in client.scan_iter(match="hr:*:log:*", count=1000):
                used += int(await client.memory_usage(key) or 0)
                tokens += int(await client.xlen(key))
        return round(used / max(1, tokens), 1)

    async def close(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        await asyncio.gather(*(child.wait() for child in self._children))
        await self.valkey.stop()


@contextlib.asynccontextmanager
async def deployed(point: Point, pods: int = 1, workers: int = 1) -> AsyncIterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        world = Deployment(Path(folder), point, pods, workers)
        try:
            await world.start()
            yield world
        finally:
            await world.close()


async def run(point: Point, chosen: argparse.Namespace) -> dict[str, object]:
    async with deployed(point, chosen.pods, chosen.workers) as world:
        told = await measure(world, point, chosen.tokens, chosen.seconds)
        return {**told, "redis_bytes_per_entry": await world.bytes_per_live_token()}


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
            told = runner.run(run(Point.of(each), chosen))
        wrong += int(str(told["wrong"]))
        print(json.dumps(told), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
