"""A deployment for route tests: real pods and replicas in this process, and what a client says to them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client import REGISTRY

from headrace.api.pod import Pod as PodState
from headrace.api.relay import StreamReply
from headrace.broker import metrics
from headrace.broker.models import ScriptedModel
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.worker import Worker
from tests.api.reading import Event, parse
from tests.serving import Pod
from tests.support import eventually
from tests.users import Server

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

MakeEngine = Callable[[ScriptedModel], ScriptedEngine]


class RecordingEngine(ScriptedEngine):
    """The scripted engine, and what it was told and made."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.told: list[Generation] = []
        self.steps: list[Step] = []

    @property
    def tokens(self) -> int:
        return sum(len(step.tokens) for step in self.steps)

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        def note(step: Step) -> None:
            self.steps.append(step)
            emit(step)

        self.told.append(generation)
        return super().start(generation, note, fail)


@dataclass(frozen=True)
class Answer:
    """A response that was read to its end."""

    status: int
    headers: httpx.Headers
    body: bytes = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an envelope, which has OpenAI's form whole."""
        assert self.headers["content-type"] == "application/json"
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Event]:
        assert self.headers["content-type"] == "text/event-stream"
        return parse(self.body)


class Deployment:
    """See the module. `engines` are the replicas' engines, in the order of `workers`."""

    def __init__(self, settings: Settings, server: Server) -> None:
        self.settings = settings
        self._server = server
        self.broker = self._broker("everyone")
        """For what tests ask, and not of the deployment itself."""
        self._workers_broker = self._broker("worker")
        self.http = httpx.AsyncClient(timeout=20, limits=httpx.Limits(max_keepalive_connections=0))
        self.pods: list[Pod] = []
        self.workers: list[Worker] = []
        self.engines: list[ScriptedEngine] = []
        self._running: dict[Worker, asyncio.Task[None]] = {}

    async def start(self, pods: int, workers: int, make_engine: MakeEngine) -> None:
        await self.broker.open()
        await self._workers_broker.open()
        for _ in range(workers):
            await self.add_worker(make_engine)
        self.pods = [Pod(self.settings, self._broker("gateway")) for _ in range(pods)]
        await eventually(lambda: all(pod.started for pod in self.pods))

    def _broker(self, user: str) -> RedisBroker:
        return RedisBroker(self._server.url_of(user), self.settings.redis, self.settings.queue)

    async def add_worker(self, make_engine: MakeEngine) -> Worker:
        model = self.settings.models[0]
        assert isinstance(model, ScriptedModel)
        self.engines.append(make_engine(model))
        worker = Worker(self.settings, model, self._workers_broker, self.engines[-1])
        await worker.start()
        self.workers.append(worker)
        self._running[worker] = asyncio.create_task(worker.run())
        return worker

    async def drain(self, worker: Worker) -> None:
        """Have a replica hand back what it runs, and end."""
        await worker.drain()
        await self._running.pop(worker)

    async def stop(self) -> None:
        await self.http.aclose()
        await asyncio.gather(*(pod.stop() for pod in self.pods))
        await asyncio.gather(*map(self.drain, list(self._running)))
        await self._workers_broker.close()
        await self.broker.close()

    @property
    def recorded(self) -> RecordingEngine:
        [engine] = self.engines
        assert isinstance(engine, RecordingEngine)
        return engine

    def state(self, pod: int = 0) -> PodState:
        """A pod from the inside."""
        state: PodState = self.pods[pod].config.app.state.pod  # type: ignore[union-attr]  # it is a FastAPI
        return state

    def jobs(self, pod: int = 0) -> set[str]:
        """The jobs whose streams are open in a pod."""
        return {stream.subject.job_id for stream in self.state(pod).beats if isinstance(stream, StreamReply)}

    # -- as a client ----------------------------------------------------------------------------------------------

    def body(self, route: str = "chat", **fields: Any) -> dict[str, Any]:
        """The least that a request must say, and `fields`; a field that is `...` is left out."""
        prompt = {"messages": [{"role": "user", "content": "hi"}]} if route == "chat" else {"prompt": "hi"}
        body = {"model": self.settings.models[0].name, **prompt, **fields}
        return {name: value for name, value in body.items() if value is not ...}

    async def ask(self, method: str, path: str, pod: int = 0, **request: Any) -> Answer:
        response = await self.http.request(method, self.pods[pod].url + path, **request)
        return Answer(response.status_code, response.headers, response.content)

    async def post(
        self, route: str = "chat", *, pod: int = 0, headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        return await self.ask("POST", PATHS[route], pod, json=self.body(route, **fields), headers=headers)

    async def stream(
        self, route: str = "chat", *, pod: int = 0, headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        return await self.post(route, pod=pod, headers=headers, stream=True, **fields)

    async def resume(self, job: str, position: str | None = None, /, *, pod: int = 0, **params: str) -> Answer:
        headers = {} if position is None else {"last-event-id": position}
        return await self.ask("GET", f"/v1/streams/{job}", pod, headers=headers, params=params)

    @contextlib.asynccontextmanager
    async def open(self, route: str = "chat", *, pod: int = 0, **fields: Any) -> AsyncIterator[Opened]:
        """A stream that the test reads itself, and may leave."""
        body = self.body(route, stream=True, **fields)
        async with self.http.stream("POST", self.pods[pod].url + PATHS[route], json=body) as response:
            yield Opened(response)

    # -- what became of it ----------------------------------------------------------------------------------------

    async def state_of(self, job: str) -> str:
        status = await self.broker.status(job)
        return status.state if status else "unknown"

    async def is_idle(self) -> bool:
        """Nothing waits or runs."""
        stats = await self.broker.stats(self.settings.models[0].name)
        return stats.running == 0 and not any(stats.waiting.values()) and all(not w.running for w in self.workers)


class Opened:
    """The response of a stream that is under way; `read` is what has come so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.job = response.headers["x-request-id"]
        self.read = b""
        self._parts = response.aiter_raw()

    async def until(self, text: bytes) -> bytes:
        """Read until `text` has come."""
        while text not in self.read:
            self.read += await anext(self._parts)
        return self.read

    async def rest(self) -> Answer:
        async for part in self._parts:
            self.read += part
        return Answer(self.response.status_code, self.response.headers, self.read)


async def raw(url: str, parts: Iterable[bytes], pause_s: float = 0.0) -> tuple[int, Answer]:
    """Send bytes as they are, and read meanwhile; how many were taken before the server ended it, and its answer."""
    loop, sent = asyncio.get_running_loop(), 0

    async def send() -> None:
        nonlocal sent
        with contextlib.suppress(ConnectionError):
            for part in parts:
                await loop.sock_sendall(client, part)
                sent += len(part)
                await asyncio.sleep(pause_s)

    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.setblocking(False)
        reading, sending = asyncio.create_task(_read_all(client)), asyncio.create_task(send())
        await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
        async with asyncio.timeout(5):
            read = await reading
        sending.cancel()
        await asyncio.wait({sending})
    head, _, body = read.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = httpx.Headers([(name, value) for name, _, value in (line.partition(": ") for line in lines)])
    return sent, Answer(int(status.split()[1]), headers, body)


async def _read_all(client: socket.socket) -> bytes:
    loop, read = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while data := await loop.sock_recv(client, 65_536):
            read += data
    return read


def count(name: str, **labels: str) -> float:
    """A metric's value now."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def nothing_is_left(deployments: Sequence[Deployment]) -> None:
    """No request, stream or reader is open in any pod."""
    pods = [(pod, each.state(index)) for each in deployments for index, pod in enumerate(each.pods)]
    await eventually(lambda: not any(pod.server_state.tasks for pod, _ in pods))
    assert [(len(state.beats), state.tail.readers) for _, state in pods] == [(0, 0)] * len(pods)
    [gauge] = metrics.STREAMS_OPEN.collect()
    assert [sample for sample in gauge.samples if sample.value] == []
