"""One deployment for all clients: Valkey, two pods, and a worker for each model, every one a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx
import redis

from headrace.broker import keys
from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, answers, real_model, scripted, until

THOUGHT = "I wonder how it is there."
CALL: dict[str, Any] = {"name": "weather", "arguments": {"place": "Bern"}}
MODELS: list[dict[str, Any]] = [
    {**real_model(), "embeddings": True},
    scripted(tokens_per_s=100.0),
    {
        **scripted(tokens_per_s=0.0),
        "name": "caller",
        "script": [{"reasoning": THOUGHT}, "Let me ", "look.", {"tool_call": CALL}],
    },
    {**scripted(tokens_per_s=50.0), "name": "broken", "script": ["half ", "an ", "answer"], "script_end": "error"},
]
REAL = str(MODELS[0]["name"])
DIMENSIONS = 64
"""Of the scripted engine's embeddings."""

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "How the weather is somewhere.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
LONG = 5000
"""Tokens of an answer that nobody waits for: 50 s."""


def words(prompt: str, count: int, seed: int = 0) -> str:
    """What the model `scripted` must say."""
    return "".join(f" {oracle(prompt, seed, 0, index):08x}" for index in range(count))


class Deployment:
    """What tests know of it: `urls`, and what became of jobs."""

    def __init__(self, machine: Machine, broker_url: str) -> None:
        self.urls = machine.urls
        self.url = machine.urls[0]
        self._machine = machine
        self._redis = redis.Redis.from_url(broker_url, protocol=2)

    @classmethod
    def settings(cls, broker_url: str) -> dict[str, object]:
        """A client that left costs its job half a second; pages of any origin may ask."""
        return {"models": MODELS, "redis": {"url": broker_url}, "api": {"grace_s": 0.5, "origins": ["*"]}}

    def start(self) -> None:
        for url in self.urls:
            self._machine.start("api", "--port", url.rpartition(":")[2])
        for model in MODELS:
            self._machine.start("worker", "--model", str(model["name"]))
        until(lambda: all(map(answers, self.urls)) and self._ready() == {model["name"] for model in MODELS}, 120)

    def _ready(self) -> set[str]:
        gone = [process.args for process in self._machine.started if process.poll() is not None]
        assert not gone, f"{gone}: {self._machine.said()}"
        running = httpx.get(f"{self.url}/api/ps").json()["models"]
        return {model["name"].removesuffix(":latest") for model in running}

    def close(self) -> None:
        self._redis.close()

    def jobs(self) -> set[str]:
        """All that the broker knows."""
        prefix = keys.key("job", 0)
        return {name.decode().removeprefix(prefix) for name in self._redis.scan_iter(f"{prefix}*", 1000)}

    def state(self, job: str) -> str:
        """As `GET /v1/streams/{job}/status` says it, of any pod."""
        return str(httpx.get(f"{self.urls[-1]}/v1/streams/{job}/status").json()["state"])

    @contextlib.contextmanager
    def one_job(self, state: str = "done") -> Iterator[None]:
        """The block makes exactly one job, and soon after it that is `state`."""
        before = self.jobs()
        yield
        [job] = self.jobs() - before
        until(lambda: self.state(job) == state, 10)

    @contextlib.contextmanager
    def no_job(self) -> Iterator[None]:
        """The block makes none."""
        before = self.jobs()
        yield
        assert self.jobs() == before
