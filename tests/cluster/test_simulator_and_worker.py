"""The simulator against the real worker loop with the scripted engine, in virtual time: nothing depends on speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.broker import keys
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.settings import QueueSettings, Settings, WorkerSettings
from headrace.cluster.simulation.fleet import Fleet, ReplicaModel, World
from headrace.cluster.simulation.rivals import Static
from headrace.cluster.simulation.trace import Trace, poisson
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.worker import Worker
from tests.cluster.virtual import VirtualLoop

REPLICAS, SLOTS, RATE, PREFILL = 2, 4, 25.0, 4000.0


class Watched(ScriptedEngine):
    """It notes when the first step of each prompt came."""

    def __init__(self, model: ScriptedModel, firsts: dict[str, float]) -> None:
        super().__init__(model)
        self._firsts = firsts

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        assert isinstance(generation.job.prompt, Text)
        text = generation.job.prompt.text

        def noted(step: Step) -> None:
            self._firsts.setdefault(text, asyncio.get_running_loop().time())
            emit(step)

        return super().start(generation, noted, fail)


async def really(trace: Trace) -> NDArray[np.float64]:
    """TTFT of each request of a trace, from workers that take it from a broker."""
    loop, firsts = asyncio.get_running_loop(), dict[str, float]()
    model = ScriptedModel(name="m", slots=SLOTS, tokens_per_s=RATE, prefill_tokens_per_s=PREFILL)
    settings = Settings([model], worker=WorkerSettings(drain_s=60, step_timeout_s=1e6))
    broker = MemoryBroker(QueueSettings(lease_s=1e4), clock=lambda: 10**12 + round(1000 * loop.time()))
    workers = [Worker(settings, model, broker, Watched(model, firsts)) for _ in range(REPLICAS)]
    for worker in workers:
        await worker.start()
    running = [asyncio.create_task(worker.run()) for worker in workers]
    await asyncio.sleep(1)
    begin_s, texts = loop.time(), []
    for number, (at, tokens, limit) in enumerate(
        zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    ):
        await asyncio.sleep(begin_s + float(at) - loop.time())
        texts.append(f"{number:08d}".ljust(4 * max(2, int(tokens)), "x"))
        job = Job(keys.new_job_id(1), "m", Text(texts[-1]), max_tokens=int(limit))
        await broker.admit(Admission(job, View("a", "m", "openai.chat")))
    while len(firsts) < len(texts):  # noqa: ASYNC110  # virtual seconds
        await asyncio.sleep(1)
    for worker, task in zip(workers, running, strict=True):
        await worker.drain()
        await task
    return np.array([firsts[text] for text in texts]) - begin_s - trace.arrival_s


def test_the_simulator_and_the_workers_agree_on_ttft() -> None:
    trace = poisson("real", [(0, 3.5), (120, 3.5)], 3, tokens=(400, 40))
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        real = runner.run(really(trace))
    model = ReplicaModel(PREFILL, SLOTS, 1 / RATE, kv_tokens=10**9, is_parallel=True)
    run = Fleet(trace, model, World(), Static(REPLICAS), REPLICAS).run()
    for share in (0.5, 0.9, 0.95, 0.99):
        expected, seen = np.quantile(run.ttft_s, share), np.quantile(real, share)
        assert abs(expected - seen) <= 0.05 * seen + 0.005, share
    assert np.quantile(real, 0.95) > 3 * np.quantile(real, 0.1)  # there was a queue
