"""The deployment behind the pages: one model that is an oracle, and others that say what no page must believe."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from headrace.broker.figures import FIELD, Published
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, answers, scripted, until

HOSTILE = [
    "# Title\n\nSome **bold** and `code`.\n\n",
    "<script>window.owned = 1</script>\n\n<img src=x onerror='window.owned = 2'>\n\n",
    "[click](javascript:window.owned=3) and [fine](https://example.org/a)\n\n",
    "- one\n- two <b>not bold</b>\n\n```html\n<script>window.owned = 4</script>\n```\n\n",
    "</div></main><style>*{display:none}</style> the end",
]
MODELS: list[dict[str, Any]] = [
    scripted(tokens_per_s=40.0),
    {**scripted(tokens_per_s=0.0), "name": "hostile", "script": HOSTILE, "autoscaling": {"max_replicas": 3}},
    {**scripted(tokens_per_s=50.0), "name": "broken", "script": ["half ", "an ", "answer"], "script_end": "error"},
    {**scripted(tokens_per_s=20.0, slots=1), "name": "mortal"},
]


def words(prompt: str, count: int) -> str:
    """What the model `scripted` must say."""
    return "".join(f" {oracle(prompt, 0, 0, index):08x}" for index in range(count))


class World:
    """What tests know of it."""

    def __init__(self, machine: Machine, broker_url: str) -> None:
        self.urls = machine.urls
        self.url = machine.urls[0]
        self.broker_url = broker_url
        self._machine = machine

    @classmethod
    def settings(cls, broker_url: str) -> dict[str, object]:
        """A lease is short, so that a lost worker is soon seen; one death is enough for a dead letter."""
        queue = {"lease_s": 1.0, "max_deaths": 1}
        return {"models": MODELS, "redis": {"url": broker_url}, "queue": queue, "api": {"grace_s": 0.5}}

    def start(self) -> None:
        origins = [f"--origin={url}" for url in self.urls]
        for url in self.urls:
            self._machine.start("api", "--port", url.rpartition(":")[2], *origins)
        for model in MODELS:
            self._machine.start("worker", "--model", str(model["name"]))
        until(lambda: all(map(answers, self.urls)) and self.ready() == {model["name"] for model in MODELS}, 60)

    def end(self) -> None:
        """Before the server ends, so that nobody waits for it."""
        self._machine.end()

    def snapshot(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/ops/snapshot").json()
        return found

    def ready(self) -> set[str]:
        assert all(process.poll() in (None, -signal.SIGKILL) for process in self._machine.started), self._machine.said()
        return {each["model"] for each in self.snapshot()["replicas"] if each["state"] == "ready"}

    def state(self, job: str) -> str:
        """As `GET /v1/streams/{job}/status` says it, of the other pod."""
        return str(httpx.get(f"{self.urls[1]}/v1/streams/{job}/status").json()["state"])

    def kill_worker(self, model: str) -> None:
        """SIGKILL, to the worker of a model, by its process id."""
        [worker] = [each for each in self._machine.started if each.poll() is None and each.args[-3] == model]  # type: ignore[index]
        worker.kill()
        worker.wait()

    def start_worker(self, model: str) -> None:
        self._machine.start("worker", "--model", model)
        until(lambda: model in self.ready(), 30)

    @contextlib.asynccontextmanager
    async def broker(self) -> AsyncIterator[RedisBroker]:
        """For what the test says in place of a replica or an autoscaler; it lasts a minute."""
        broker = RedisBroker(self.broker_url, RedisSettings(), QueueSettings(lease_s=60.0))
        await broker.open()
        try:
            yield broker
        finally:
            await broker.close()

    @contextlib.asynccontextmanager
    async def crowd(self, model: str, count: int) -> AsyncIterator[None]:
        """So many replicas more, which only say that they are there."""
        ids = [f"crowd-{number:03}" for number in range(count)]
        async with self.broker() as broker:
            for number, each in enumerate(ids):
                state = "starting" if number % 20 == 19 else "draining" if number % 30 == 29 else "ready"
                busy = 0 if state == "starting" else number * 37 % 65
                about: dict[str, str | int] = {"model": model, "state": state, "slots": 64, "running": busy}
                said = Published(tokens_per_s=20.0 * busy)
                about |= {"host": f"gpu-{number // 8}", "pid": 1000 + number, FIELD: msgspec.json.encode(said).decode()}
                await broker.present("replicas", each, model, about)
            try:
                yield
            finally:
                for each in ids:
                    await broker.absent("replicas", each, model)
