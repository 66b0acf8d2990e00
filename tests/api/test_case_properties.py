"""The law of a resumed stream, for answers that nobody would write by hand: no HTTP and no server, all else is real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from headrace.api.pod import Pod
from headrace.api.relay import StreamReply
from headrace.api.reply import Subject
from headrace.api.requests import Cut
from headrace.api.wire import BY_NAME
from headrace.broker import keys
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.settings import QueueSettings, Settings
from headrace.broker.tail import Reader
from headrace.workers.engines.protocol import Step
from headrace.workers.worker import Worker
from tests.api.deployment import RecordingEngine
from tests.api.reading import Event, content, finishes, parse

PIECES = ["a", "b", "X", "ST", "OP", "STOP", "", " ", "\u2028", "é", "😀", "<|im_end|>", "<|im", [0xFF]]
PIECES += [[byte] for byte in "😀歪".encode()]

scripts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=24)
stops = st.lists(st.sampled_from(["STOP", "aX", "ab", "😀", "\ufffd", "OPOP"]), max_size=2, unique=True)
ends = st.sampled_from(["eos", "limit", "error"])


class Passing(RecordingEngine):
    """Has the job handed on after so many more tokens, once for each number."""

    def __init__(self, model: ScriptedModel, hand_on_after: list[int], hand_on: Callable[[], Awaitable[None]]) -> None:
        super().__init__(model)
        self._after = list(hand_on_after)
        self._hand_on = hand_on
        self.passing: list[asyncio.Task[Any]] = []

    def start(self, generation: Any, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Any:
        left = self._after.pop(0) if self._after else -1

        def note(step: Step) -> None:
            nonlocal left
            emit(step)
            left -= 1
            if left == 0:
                self.passing.append(asyncio.ensure_future(self._hand_on()))

        return super().start(generation, note, fail)


class System:
    """One job on a replica that may hand it on to itself, and a pod that reads it."""

    def __init__(self, model: ScriptedModel, view: View, job: Job, hand_on_after: list[int]) -> None:
        self.view = view
        self.job = job
        queue = QueueSettings()
        self.broker = MemoryBroker(queue)
        self.pod = Pod(Settings([model], queue=queue), self.broker)
        self.engine = Passing(model, hand_on_after, lambda: self.worker.release_all())
        self.worker = Worker(self.pod.settings, model, self.broker, self.engine)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.worker.start()
        working = asyncio.create_task(self.worker.run())
        await self.pod.start()
        yield
        await asyncio.gather(*self.engine.passing)
        await self.worker.drain()
        await working
        await self.pod.close()

    async def first(self) -> list[Event]:
        admitted = await self.broker.admit(Admission(self.job, self.view, self.pod.id))
        return await self._read(self.pod.tail.open_admitted(self.job.id, admitted), None)

    async def after(self, position: str) -> list[Event]:
        _, place, *frame = position.split(".")
        cut = Cut(self.job.id, keys.position(place), int(frame[0]) if frame else None)
        return await self._read(await self.pod.tail.attach(self.job.id), cut)

    async def _read(self, reader: Reader, cut: Cut | None) -> list[Event]:
        body = bytearray()

        async def send(message: Message) -> None:
            body.extend(message.get("body", b""))

        async def receive() -> Message:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody leaves here")

        subject = Subject(self.pod, self.job.id, self.view, BY_NAME[self.view.format], "/v1/streams/{job}", None)
        await StreamReply(subject, reader, cut)({"type": "http"}, receive, send)
        assert self.pod.tail.readers == 0 and not self.pod.beats
        return parse(bytes(body))


async def read_in_parts(system: System, cuts: list[int]) -> list[Event]:
    """The whole stream; each resume from some of its events gives the same rest."""
    async with system.running():
        whole = await system.first()
        for cut in cuts:
            index = cut % (len(whole) - 1)
            rest = await system.after(whole[index].id)
            assert rest == whole[index + 1 :]
    return whole


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(["openai.chat", "openai.completions"]),
    script=scripts,
    stop=stops,
    end=ends,
    n=st.integers(1, 2),
    limit=st.none() | st.integers(1, 24),
    hand_on_after=st.lists(st.integers(1, 6), max_size=3),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_a_stream_cut_anywhere_and_a_job_handed_on_anywhere_say_the_same(
    name: str,
    script: list[Any],
    stop: list[str],
    end: str,
    n: int,
    limit: int | None,
    hand_on_after: list[int],
    cuts: list[int],
) -> None:
    model = ScriptedModel(name="m", tokens_per_s=3000.0, script=script, script_end=end)
    view = View("alice", "m", name, n=n, stream=True, include_usage=True)
    job = Job(keys.new_job_id(1), "m", Text("hi"), limit, n, stop)
    calm = asyncio.run(read_in_parts(System(model, view, job, []), cuts))
    handed_on = asyncio.run(read_in_parts(System(model, view, job, hand_on_after), cuts))
    for index in range(n):
        assert content(handed_on, index) == content(calm, index)
        assert finishes(handed_on, index)[-1:] == finishes(calm, index)[-1:]
    assert [event.json.get("usage") for event in handed_on[-2:-1]] == [event.json.get("usage") for event in calm[-2:-1]]
    assert len({event.id for event in handed_on}) == len(handed_on)
