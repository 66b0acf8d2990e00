"""Replicas on a broker in memory, and an engine whose every step the test makes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from headrace.broker import keys, messages
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Delta, Ended, Finished, Job, ReadEntry, Result, Started, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission, Broker
from headrace.broker.settings import QueueSettings, Settings, WorkerSettings
from headrace.broker.tasks import cancel_all
from headrace.workers.engines.protocol import Capabilities, Engine, Figures, Generation, Step, Token
from headrace.workers.engines.scripted import oracle
from headrace.workers.worker import Worker
from tests.faults import FaultyBroker
from tests.support import eventually


class HandRun:
    """A sequence that goes on when the test says so; `is_cancelled` says that the engine was told to stop it."""

    def __init__(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> None:
        self.generation = generation
        self.emit = emit
        self.fail = fail
        self.is_cancelled = False
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.is_cancelled = True
        self.cancelled.set()

    def say(self, *pieces: str | bytes, end: Any = None) -> None:
        """One step with these tokens."""
        self.emit(Step([token_of(piece) for piece in pieces], end=end))


_vocabulary: list[bytes] = []


def token_of(piece: str | bytes) -> Token:
    """The token of some bytes, the same for all hand engines."""
    data = piece.encode() if isinstance(piece, str) else piece
    if data not in _vocabulary:
        _vocabulary.append(data)
    return Token(_vocabulary.index(data), data)


class HandEngine:
    """It hangs unless the test makes steps. A prompt that is `bad` is refused."""

    def __init__(self) -> None:
        self.capabilities = Capabilities(slots=4, context_tokens=1000)
        self.runs: list[HandRun] = []
        self.encoding = asyncio.Event()
        """Closed, it holds every prompt back."""
        self.encoding.set()
        self.is_closed = False
        self.load_error: Exception | None = None
        self.health_error: Exception | None = None
        self.is_exact = True
        """Whether it can continue what it has begun."""

    async def load(self, progress: Callable[[str, float], None]) -> None:
        progress("loading", 0.5)
        if self.load_error is not None:
            raise self.load_error

    async def encode(self, job: Job) -> list[int]:
        prompt = job.prompt
        await self.encoding.wait()
        assert isinstance(prompt, Text)
        if prompt.text == "bad":
            raise BadRequest("this prompt is bad", param="prompt")
        if prompt.text == "bug":
            raise RuntimeError("a bug at /srv/app/secret.py")
        return [0] * len(prompt.text)

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        raise BadRequest("it generates only")

    def can_continue(self, job: Job) -> bool:
        return self.is_exact

    def token(self, token_id: int) -> Token:
        return Token(token_id, _vocabulary[token_id])

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> HandRun:
        self.runs.append(run := HandRun(generation, emit, fail))
        return run

    def figures(self) -> Figures:
        return Figures(sum(not run.is_cancelled for run in self.runs), None, len(self.runs), 0.5, 4000)

    async def check_health(self) -> None:
        if self.health_error is not None:
            raise self.health_error

    async def close(self) -> None:
        self.is_closed = True


class Replica:
    """A running worker, and what it runs on."""

    def __init__(self, worker: Worker, engine: Engine) -> None:
        self.worker = worker
        self.engine = engine
        self.task = asyncio.create_task(worker.run())

    @property
    def hand(self) -> HandEngine:
        assert isinstance(self.engine, HandEngine)
        return self.engine

    async def run(self, index: int = 0) -> HandRun:
        """The engine's run of this number, once it is there."""
        await eventually(lambda: len(self.hand.runs) > index)
        return self.hand.runs[index]

    async def drain(self) -> None:
        await self.worker.drain()
        await self.task

    async def die(self) -> None:
        """End without a word to the broker, as if killed."""
        for task in [self.task, *self.worker._tasks, *self.worker._job_tasks]:
            task.cancel()


class Stage:
    """A broker that fails as told, jobs, and replicas that take them."""

    def __init__(self, broker: Broker, *, slots: int = 4, queue: QueueSettings, **worker: float) -> None:
        self.plain = broker
        self.faults = FaultyBroker(broker)
        model = ScriptedModel(name="m", slots=slots, tokens_per_s=0)
        self.settings = Settings([model], queue=queue, worker=WorkerSettings(pace_s=0.0, **worker))  # type: ignore[arg-type]
        self._replicas: list[Replica] = []

    async def replica(self, engine: Engine | None = None, *, is_faulty: bool = True) -> Replica:
        """A replica that is ready; its engine hangs if none is given."""
        engine = engine or HandEngine()
        broker = self.faults.broker if is_faulty else self.plain
        worker = Worker(self.settings, self.settings.models[0], broker, engine)
        await worker.start()
        self._replicas.append(replica := Replica(worker, engine))
        return replica

    async def close(self) -> None:
        self.faults.down.clear()
        self.faults.gate.set()
        for replica in self._replicas:
            if isinstance(replica.engine, HandEngine):
                replica.engine.encoding.set()
        await cancel_all([replica.task for replica in self._replicas])

    async def admit(self, text: str = "hello", **fields: Any) -> str:
        """A job in the queue."""
        await self.plain.present("cluster", "test", "m", {})
        job = Job(keys.new_job_id(1), "m", Text(text), **fields)
        view = View("alice", "m", "openai.chat", n=job.n)
        await self.plain.admit(Admission(job, view))
        return job.id

    async def log(self, job_id: str) -> list[ReadEntry]:
        rows = await self.plain.read(job_id, "0-1", 100_000)
        return [messages.decode_entry(entry_id, data) for entry_id, data in rows]

    async def state(self, job_id: str) -> str:
        status = await self.plain.status(job_id)
        return status.state if status else "unknown"

    async def ended(self, job_id: str, within_s: float = 5.0) -> Ended:
        """How the job ended, once it has: with one terminal event, which is its last."""

        async def is_over() -> bool:
            return await self.state(job_id) not in ("waiting", "running")

        await eventually(is_over, within_s)
        entries = await self.log(job_id)
        ends = [event for entry in entries for event in entry.events if isinstance(event, Ended)]
        assert entries[-1].is_end
        [ended] = ends
        return ended

    async def text(self, job_id: str, choice: int = 0) -> str:
        entries = await self.log(job_id)
        return "".join(
            event.text
            for entry in entries
            for event in entry.events
            if isinstance(event, Delta) and event.choice == choice
        )

    async def events(self, job_id: str, *kinds: type[Any]) -> list[Any]:
        return [event for entry in await self.log(job_id) for event in entry.events if isinstance(event, kinds)]

    async def finishes(self, job_id: str) -> list[Finished]:
        return await self.events(job_id, Finished)

    async def starts(self, job_id: str) -> list[Started]:
        return await self.events(job_id, Started)


MakeStage = Callable[..., Awaitable[Stage]]


def oracle_text(text: str, tokens: int, *, seed: int = 0, choice: int = 0) -> str:
    return "".join(f" {oracle(text, seed, choice, index):08x}" for index in range(tokens))
