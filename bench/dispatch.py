"""How long a free slot stays empty while jobs wait, and what the verbs that run all the time cost.

`python bench/dispatch.py --waiting 10,1000,100000` starts Valkey and one replica (8 slots, jobs of 50 ms) in this
process and prints, for each length of the queue, the time from an engine's last step of a job to its first of the next
one, and for an empty queue the time from `admit`'s answer to the first step. Then, at 64 slots x 16 replicas and 10,000
readers, what a call of `tick`, `watch` (of all readers, in the pod's chunks) and `reap` takes, and of the server's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

from headrace.broker import keys, prefixes
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings, Settings
from headrace.broker.tasks import loop_factory
from headrace.cli.processes import usage
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.worker import Worker

MODEL = "m"
QUEUE = QueueSettings(max_waiting_jobs=1_000_000, max_waiting_tokens=1 << 40, max_waiting_bytes=1 << 40)
RUNNING = (64, 16)
READERS = 10_000


class Watched(ScriptedEngine):
    """It notes when a slot became free, and how long it took until the next job's first step."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.freed: deque[float] = deque()
        self.empty_s: list[float] = []
        self.firsts: dict[str, float] = {}

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        is_first = True

        def step(made: Step) -> None:
            nonlocal is_first
            now = time.perf_counter()
            if is_first:
                is_first = False
                self.firsts[generation.job.id] = now
                if self.freed:
                    self.empty_s.append(now - self.freed.popleft())
            emit(made)
            if made.end is not None:
                self.freed.append(now)

        return super().start(generation, step, fail)


@contextlib.asynccontextmanager
async def broker() -> AsyncIterator[tuple[RedisBroker, EmbeddedServer]]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        server = EmbeddedServer(folder, has_users=False)
        await server.start()
        opened = RedisBroker(server.url, RedisSettings(), QUEUE)
        try:
            await opened.open()
            await opened.present("cluster", "bench", MODEL, {})
            yield opened, server
        finally:
            await opened.close()
            await server.stop()


def admission(pod: str | None = None, prompt_bytes: int = 2) -> Admission:
    """A prompt of three quarters that it shares with others, of twenty kinds, and an end of its own."""
    job_id = keys.new_job_id(1)
    shared, own = f"{int(job_id[-2:], 16) % 20:02d}", job_id[-8:]
    text = (shared * prompt_bytes)[: prompt_bytes * 3 // 4] + (own * prompt_bytes)[: -(-prompt_bytes // 4)]
    job = Job(job_id, MODEL, Text(text), max_tokens=5)
    return Admission(job, View("alice", MODEL, "openai.chat"), pod, prefix=prefixes.anchors(job))


async def admit(to: RedisBroker, count: int, pod: str | None = None, prompt_bytes: int = 2) -> None:
    for done in range(0, count, 500):
        await to.present("cluster", "bench", MODEL, {})
        await asyncio.gather(*(to.admit(admission(pod, prompt_bytes)) for _ in range(min(500, count - done))))


async def dispatch(waiting: int, prompt_bytes: int, jobs: int = 400) -> dict[str, object]:
    async with broker() as (opened, _):
        await admit(opened, waiting, None, prompt_bytes)
        model = ScriptedModel(name=MODEL, slots=8, tokens_per_s=100)
        engine = Watched(model)
        worker = Worker(Settings([model], queue=QUEUE), model, opened, engine)
        await worker.start()
        running = asyncio.create_task(worker.run())
        if waiting:
            keeping = asyncio.create_task(_keep(opened, waiting, prompt_bytes))
            while len(engine.empty_s) < jobs:  # noqa: ASYNC110  # a wake-up per step would be measured too
                await asyncio.sleep(0.05)
            keeping.cancel()
            measured = engine.empty_s[8:]
        else:
            await asyncio.sleep(0.5)
            measured = [await _alone(opened, engine, prompt_bytes) for _ in range(jobs // 4)]
        running.cancel()
        await asyncio.wait([running])
        what = "a slot's end to the next first step" if waiting else "admitted to the first step, idle"
        return {"waiting": waiting, "prompt_bytes": prompt_bytes, "measured": what, "ms": _quantiles(measured)}


async def _keep(to: RedisBroker, waiting: int, prompt_bytes: int) -> None:
    """As many as are taken come anew, so that a short queue stays as long."""
    while True:
        stats = await to.stats(MODEL)
        await admit(to, max(0, waiting - sum(stats.waiting.values())), None, prompt_bytes)
        await asyncio.sleep(0.02)


async def _alone(to: RedisBroker, engine: Watched, prompt_bytes: int) -> float:
    asked = admission(None, prompt_bytes)
    await to.admit(asked)
    answered = time.perf_counter()
    async with asyncio.timeout(5):
        while asked.job.id not in engine.firsts:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.07)  # until it is over
    return engine.firsts[asked.job.id] - answered


async def verbs(rounds: int = 200) -> list[dict[str, object]]:
    async with broker() as (opened, server):
        slots, replicas = RUNNING
        await admit(opened, slots * replicas, "pod")
        await opened.present("cluster", "bench", MODEL, {})
        for replica in range(replicas):
            await opened.claim(0, f"r{replica}", MODEL, slots)
        await admit(opened, READERS - slots * replicas, "pod")
        job_ids = await _jobs(server)
        assert server.process is not None
        pid = server.process.pid

        async def tick() -> None:
            await opened.tick(0, "r0", 0, renew=False, list_held=False)

        async def renew() -> None:
            await opened.tick(0, "r0", 0, renew=True, list_held=True)

        async def watch() -> None:
            for at in range(0, len(job_ids), 512):
                await opened.watch("pod", job_ids[at : at + 512])

        async def reap() -> None:
            await opened.reap(0)

        return [
            await _cost("tick, nothing new", tick, rounds, pid),
            await _cost(f"tick that renews {slots} leases", renew, rounds, pid),
            await _cost(f"watch of {len(job_ids)} readers", watch, 5, pid),
            await _cost("reap, nothing due", reap, rounds, pid),
        ]


async def _jobs(server: EmbeddedServer) -> list[str]:
    import redis.asyncio as redis

    async with redis.Redis.from_url(server.url, protocol=2) as client:
        return [key.decode()[-32:] async for key in client.scan_iter(match="hr:*:job:*", count=1000)]


async def _cost(name: str, call: Callable[[], Awaitable[None]], rounds: int, pid: int) -> dict[str, object]:
    before, began = usage([pid])[pid].cpu_s, time.perf_counter()
    for _ in range(rounds):
        await call()
    wall_s, cpu_s = time.perf_counter() - began, usage([pid])[pid].cpu_s - before
    return {"verb": name, "ms": round(wall_s / rounds * 1000, 3), "server_cpu_ms": round(cpu_s / rounds * 1000, 3)}


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)] * 1000, 2) for q in (50, 99)}


async def main(lengths: list[int], prompt_bytes: int, *, has_verbs: bool) -> None:
    for waiting in lengths:
        print(json.dumps(await dispatch(waiting, prompt_bytes)), flush=True)
    for row in await verbs() if has_verbs else []:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="dispatch", description=__doc__)
    options.add_argument("--waiting", default="0,10,1000,100000")
    options.add_argument("--prompt-bytes", type=int, default=2, help="from 1024 on prompts have a prefix")
    options.add_argument("--no-verbs", action="store_true")
    chosen = options.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        lengths = [int(each) for each in chosen.waiting.split(",")]
        runner.run(main(lengths, chosen.prompt_bytes, has_verbs=not chosen.no_verbs))
