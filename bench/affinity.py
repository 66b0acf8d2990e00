"""What prefix affinity brings with real workers: a trace with named blocks, replayed on Valkey and scripted replicas.

`python bench/affinity.py --trace FILE.jsonl --seconds 300 --speed 10` replays the first five minutes of a trace ten
times as fast, on four replicas in this process whose engines prefill prompts one after the other and remember them,
once without prefixes (`none`) and once with (`affinity`). It prints for each the share of prompt tokens that needed no
prefill, that of one cache which forgets nothing, and how long prompts waited for their first token. Without `--trace`
the conversations are made up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

from headrace.broker import keys, prefixes
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings, Settings
from headrace.broker.tasks import loop_factory
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.engines.scripted_cache import PrefixCache
from headrace.workers.worker import Worker

MODEL = "m"
BLOCK_BYTES = 2048  # 512 tokens of the scripted engine
PREFILL_TOKENS_PER_S = 20_000.0
QUEUE = QueueSettings(max_waiting_tokens=1 << 40, max_waiting_bytes=1 << 40, lease_s=30.0)


class Request(NamedTuple):
    at_s: float
    blocks: tuple[int, ...]
    output_tokens: int

    @property
    def text(self) -> str:
        return "".join(f"{name:08x}" * (BLOCK_BYTES // 8) for name in self.blocks)


class Watched(ScriptedEngine):
    """It notes each prompt's first step: when, how many tokens it had, and how many of them were cached."""

    def __init__(self, model: ScriptedModel, firsts: dict[str, tuple[float, int, int]]) -> None:
        super().__init__(model)
        self._firsts = firsts

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        job_id, tokens = generation.job.id, len(generation.prompt_ids)

        def noted(step: Step) -> None:
            if job_id not in self._firsts:
                self._firsts[job_id] = asyncio.get_running_loop().time(), tokens, step.cached_tokens
            emit(step)

        return super().start(generation, noted, fail)


def read(file: str, seconds: float) -> list[Request]:
    rows = (json.loads(line) for line in Path(file).read_text("utf-8").splitlines())
    found = [Request(row["timestamp"] / 1000, tuple(row["hash_ids"]), row["output_length"]) for row in rows]
    return [request for request in found if request.at_s < seconds]


def made_up(seconds: float) -> list[Request]:
    chance, found, names = random.Random(1), [], iter(range(3, 1 << 31))
    for _ in range(int(seconds)):
        at = chance.uniform(0, seconds)
        blocks: tuple[int, ...] = (0, 1, 2)
        while at < seconds:
            blocks += tuple(next(names) for _ in range(chance.randint(1, 12)))
            found.append(Request(at, blocks, 200))
            at += chance.uniform(10, 60)
    return sorted(found)


async def replay(
    requests: Sequence[Request], speed: float, replicas: int, cache_tokens: int, *, has_affinity: bool
) -> str:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        server = EmbeddedServer(folder, has_users=False)
        await server.start()
        broker = RedisBroker(server.url, RedisSettings(), QUEUE)
        await broker.open()
        try:
            return await _replay(broker, requests, speed, _model(speed, replicas, cache_tokens), has_affinity)
        finally:
            await broker.close()
            await server.stop()


def _model(speed: float, replicas: int, cache_tokens: int) -> ScriptedModel:
    return ScriptedModel(
        name=MODEL,
        replicas=replicas,
        slots=64,
        tokens_per_s=40.0 * speed,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S * speed,
        prefills_in_turn=True,
        cache_tokens=cache_tokens,
        context_tokens=1 << 20,
    )


async def _replay(
    broker: RedisBroker, requests: Sequence[Request], speed: float, model: ScriptedModel, has_affinity: bool
) -> str:
    loop, firsts, asked = asyncio.get_running_loop(), dict[str, tuple[float, int, int]](), dict[str, float]()
    workers = [
        Worker(Settings([model], queue=QUEUE), model, broker, Watched(model, firsts)) for _ in range(model.replicas)
    ]
    for worker in workers:
        await worker.start()
    running = [asyncio.create_task(worker.run()) for worker in workers]
    began = loop.time() + 0.5
    for request in requests:
        await asyncio.sleep(began + request.at_s / speed - loop.time())
        job = Job(keys.new_job_id(1), MODEL, Text(request.text), max_tokens=min(request.output_tokens, 50))
        prefix = prefixes.anchors(job) if has_affinity else b""
        asked[job.id] = loop.time()
        tokens = len(request.blocks) * BLOCK_BYTES // 4
        await broker.admit(Admission(job, View("a", MODEL, "plain"), None, -1, tokens, tokens + 50, prefix=prefix))
    while len(firsts) < len(requests):  # noqa: ASYNC110  # a wake-up per step would be measured too
        await asyncio.sleep(0.1)
    for worker, task in zip(workers, running, strict=True):
        await worker.drain()
        await task
    return _told(requests, firsts, asked, speed, has_affinity)


def _told(
    requests: Sequence[Request],
    firsts: dict[str, tuple[float, int, int]],
    asked: dict[str, float],
    speed: float,
    has_affinity: bool,
) -> str:
    tokens, cached = (sum(first[place] for first in firsts.values()) for place in (1, 2))
    cache = PrefixCache(1 << 50)
    best = sum(cache.use(request.text.encode()) for request in requests)
    ttft = sorted((firsts[job_id][0] - at) * speed for job_id, at in asked.items())
    return json.dumps(
        {
            "placement": "affinity" if has_affinity else "none",
            "requests": len(requests),
            "hit_share": round(cached / tokens, 4),
            "best_share": round(best / tokens, 4),
            "ttft_s_in_the_traces_time": {
                f"p{q}": round(ttft[min(len(ttft) - 1, len(ttft) * q // 100)], 2) for q in (50, 90, 99)
            },
        }
    )


async def main(options: argparse.Namespace) -> None:
    requests = read(options.trace, options.seconds) if options.trace else made_up(options.seconds)
    for has_affinity in (False, True):
        told = await replay(requests, options.speed, options.replicas, options.cache_tokens, has_affinity=has_affinity)
        print(told, flush=True)


if __name__ == "__main__":
    asked_for = argparse.ArgumentParser(prog="affinity", description=__doc__)
    asked_for.add_argument("--trace")
    asked_for.add_argument("--seconds", type=float, default=300.0)
    asked_for.add_argument("--speed", type=float, default=10.0)
    asked_for.add_argument("--replicas", type=int, default=4)
    asked_for.add_argument("--cache-tokens", type=int, default=4_000_000)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(main(asked_for.parse_args()))
