"""What open streams cost a pod while nothing happens in them: memory, and CPU for heartbeats and leases.

`python bench/idle.py --streams 10000` opens streams whose engine makes a token in a hundred seconds, waits until all
have their first, and looks at the pod for `--seconds`. With `--scrapes 20` Prometheus asks it so many times after that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

from bench import points_client
from bench.points import deployed
from bench.points_client import Load, Seen
from bench.points_measure import MODEL, PATH, Point
from headrace.broker.tasks import loop_factory
from headrace.cli.processes import usage

INTERVAL_MS = 100_000
AT_ONCE = 100
SCRAPE_S = 1.1


async def main(streams: int, seconds: float, scrapes: int) -> None:
    async with deployed(Point(streams, INTERVAL_MS)) as world:
        load = Load(streams, 2, world.ports, PATH, MODEL, 0.0)
        roles = {role: pids[0] for role, pids in world.pids().items()}
        idle = usage(roles.values())
        seen: list[Seen] = []
        for at in range(0, streams, AT_ONCE):
            seen += await asyncio.gather(*(_opened(load, index) for index in range(at, min(streams, at + AT_ONCE))))
        await asyncio.sleep(5.0)
        first = usage(roles.values())
        await asyncio.sleep(seconds)
        second = usage(roles.values())
        told = {
            role: {
                "kib_per_stream": round((second[pid].rss_bytes - idle[pid].rss_bytes) / 1024 / streams, 1),
                "cpu_ms_per_s": round((second[pid].cpu_s - first[pid].cpu_s) * 1000 / seconds, 1),
            }
            for role, pid in roles.items()
        }
        if scrapes:
            told["pod"]["cpu_ms_per_scrape"] = await _scraped(
                world.ports[0], roles["pod"], scrapes, told["pod"]["cpu_ms_per_s"]
            )
        print(json.dumps({"streams": streams, **told}))


async def _scraped(port: int, pid: int, scrapes: int, idle_ms_per_s: float) -> float:
    """CPU of a pod for each scrape, over what it uses anyway; far enough apart that each asks the broker too."""
    async with httpx.AsyncClient() as http:
        before, began = usage([pid])[pid].cpu_s, time.monotonic()
        for _ in range(scrapes):
            (await http.get(f"http://127.0.0.1:{port}/metrics")).raise_for_status()
            await asyncio.sleep(SCRAPE_S)
        used_s, took_s = usage([pid])[pid].cpu_s - before, time.monotonic() - began
    return round((1000 * used_s - idle_ms_per_s * took_s) / scrapes, 1)


async def _opened(load: Load, index: int) -> Seen:
    """A stream that has its first token; its connection stays open for as long as this process lives."""
    seen = Seen(f"idle {index}", 0.0)
    loop = asyncio.get_running_loop()
    request = points_client.request(load, seen.text, load.ports[0])
    await loop.create_connection(
        lambda: points_client.Exchange(request, seen, lambda: None), "127.0.0.1", load.ports[0]
    )
    async with asyncio.timeout(60):
        while not seen.arrivals:  # noqa: ASYNC110  # the client is to be as light as it can be
            await asyncio.sleep(0.01)
    return seen


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="idle", description=__doc__)
    options.add_argument("--streams", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=30.0)
    options.add_argument("--scrapes", type=int, default=0)
    chosen = options.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(chosen.streams, chosen.seconds, chosen.scrapes))
