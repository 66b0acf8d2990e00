"""What the tests of all rooms share: waiting on a condition, and jobs to admit."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from headrace.broker import keys
from headrace.broker.messages import Band, Chat, Job, Message, Text, View
from headrace.broker.protocol import Admission
from tests.users import Server


async def eventually(condition: Callable[[], object], within_s: float = 5.0) -> None:
    """Ask until the answer, awaited if need be, is true; fails after `within_s`. Tests wait so and never sleep."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        answer = condition()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {within_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(0.005)


def an_admission(
    job_id: str | None = None,
    *,
    model: str = "m",
    band: Band = "default",
    pod: str | None = None,
    grace_ms: int = -1,
    owner: str = "alice",
    **queueing: Any,
) -> Admission:
    """A job as a pod would admit it; a new one on shard 0 if no id is given. `queueing` is more of `Admission`."""
    job = Job(job_id or keys.new_job_id(1), model, Chat([Message("user", "hello")]), max_tokens=8)
    return Admission(job, View(owner, model, "openai.chat", band), pod, grace_ms, **queueing)


def a_text_job(text: str) -> Job:
    return Job(keys.new_job_id(1), "m", Text(text))


@contextlib.contextmanager
def own_server(folder: str) -> Iterator[str]:
    """A server of its own in this folder, for what runs beside other tests; its address."""
    with asyncio.Runner() as runner:
        server = Server(folder)
        runner.run(server.start())
        try:
            yield server.url
        finally:
            runner.run(server.stop())
