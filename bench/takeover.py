"""How long a client waits for its next token when a worker is killed, and when it drains.

`python bench/takeover.py --trials 10` starts Valkey, a pod and two workers of its own, opens streams, ends one worker,
and measures the gap in each stream that another worker took over. Exit status 1 if a text is not the oracle's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

from bench.chaos_stream import Broken, ask
from bench.chaos_world import LEASE_S, MODEL, World
from headrace.client import sse
from headrace.workers.engines.scripted import oracle

TOKENS = 150
RATE = 40.0


async def stream(port: int, text: str) -> tuple[str, float, bool]:
    """Read one stream: its text, its longest gap in seconds, and whether a second attempt wrote part of it."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "stream": True}
    parser, said, gap_s, attempts = sse.Parser(), "", 0.0, set[str]()
    last = 0.0
    async with ask(port, "POST", "/v1/chat/completions", {}, json.dumps(body).encode()) as answer:
        async for piece in answer.pieces():
            for event in parser.feed(piece):
                choices = [] if event.data == "[DONE]" else json.loads(event.data)["choices"]
                if choices and (content := choices[0]["delta"].get("content")):
                    now = time.monotonic()
                    gap_s, last = max(gap_s, now - last if last else 0.0), now
                    said += content
                    attempts.add(event.id.split(".")[1].split("-")[0])
    return said, gap_s, len(attempts) > 1


async def trial(world: World, number: int, how: signal.Signals, streams: int) -> list[float]:
    """Gaps of the streams that were taken over; raises AssertionError if a text is wrong."""
    texts = [f"{how.name} {number} {index}" for index in range(streams)]
    reading = [asyncio.create_task(stream(world.ports[0], text)) for text in texts]
    await asyncio.sleep(1.0)
    world.workers[number % len(world.workers)].signal(how)
    gaps = []
    for text, (said, gap_s, is_taken_over) in zip(texts, await asyncio.gather(*reading), strict=True):
        assert said == "".join(f" {oracle(text, 0, 0, index):08x}" for index in range(TOKENS)), f"wrong text: {text}"
        if is_taken_over:
            gaps.append(gap_s)
    return gaps


async def until_served(world: World, count: int) -> None:
    while True:
        replicas = await world.broker.listing("replicas")
        if sum(row["state"] == "ready" for row in replicas.values()) >= count:
            return
        await asyncio.sleep(0.1)


async def main(trials: int, streams: int) -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        world = World(Path(folder), 1, 2, RATE)
        await world.start()
        try:
            for how in (signal.SIGKILL, signal.SIGTERM):
                gaps: list[float] = []
                for number in range(trials):
                    await until_served(world, 2)
                    await asyncio.sleep(random.uniform(0.5, 1.5))
                    try:
                        gaps += await trial(world, number, how, streams)
                    except Broken:
                        continue  # a pod that was not up yet
                print(json.dumps(_figures(how, sorted(gaps))), flush=True)
        finally:
            await world.close()


def _figures(how: signal.Signals, gaps: list[float]) -> dict[str, object]:
    def at(share: float) -> float | None:
        return round(gaps[min(len(gaps) - 1, int(share * len(gaps)))], 3) if gaps else None

    lease_s = LEASE_S if how is signal.SIGKILL else 0.0
    return {"fault": how.name, "lease_s": lease_s, "streams": len(gaps), "gap_s": {"p50": at(0.5), "p99": at(0.99)}}


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="takeover", description=__doc__)
    options.add_argument("--trials", type=int, default=10)
    options.add_argument("--streams", type=int, default=20)
    chosen = options.parse_args()
    asyncio.run(main(chosen.trials, chosen.streams))
