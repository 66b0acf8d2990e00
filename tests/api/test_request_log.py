"""One line for each request, at its end, with figures and without what anybody wrote."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.broker import logs
from headrace.broker.models import ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.settings import KeySettings
from headrace.workers.engines.protocol import Generation, Run, Step
from headrace.workers.engines.scripted import ScriptedEngine
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually

SECRET = "the-prompt-of-somebody"
ALICE = KeySettings("alice", hashlib.sha256(b"a-key-of-alice").hexdigest())


class Lines:
    """What was logged, as JSON lines."""

    def __init__(self, stream: io.StringIO) -> None:
        self._stream = stream

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    def of(self, *events: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in lines if line["event"] in events]

    async def requests(self, count: int) -> list[dict[str, Any]]:
        """The lines of requests, once so many are there: a client may have its answer before."""
        await eventually(lambda: len(self.of("request")) >= count)
        found = self.of("request")
        assert len(found) == count
        return found


@pytest.fixture
def said() -> Iterator[Lines]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.configure("info", "json", stream=stream)
    yield Lines(stream)
    root.handlers[:] = handlers
    root.setLevel(level)


async def test_the_line_of_a_stream(deploy: Deploy, said: Lines) -> None:
    up = await deploy({"tokens_per_s": 100.0})
    answer = await up.stream(max_tokens=5, headers={"x-request-id": "order-7", "x-priority": "batch"})
    [line] = await said.requests(1)
    figures = {name: line.pop(name) for name in ("duration_ms", "queue_ms", "ttft_ms", "tpot_ms")}
    assert 0 <= figures["queue_ms"] <= figures["ttft_ms"] <= figures["duration_ms"] + 1
    assert 0 < figures["tpot_ms"] < 1000
    del line["at"], line["logger"]
    assert line == {
        "level": "info", "event": "request", "message": "request ok",
        "request_id": answer.headers["x-request-id"], "user_request_id": "order-7",
        "route": "/v1/chat/completions", "format": "openai.chat", "model": "scripted", "owner": "anonymous",
        "priority": "batch", "outcome": "ok", "status": 200, "stream": True,
        "prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 5, "attempts": 1, "resumes": 0,
    }  # fmt: skip


async def test_an_answer_in_one_piece_and_a_resume_have_lines(deploy: Deploy, said: Lines) -> None:
    up = await deploy(pods=2)
    answer = await up.post(max_tokens=3)
    job = answer.headers["x-request-id"]
    for pod in (1, 0):
        await up.resume(job, pod=pod)
    first, second, third = await said.requests(3)
    assert (first["stream"], first["completion_tokens"], first.get("resumed")) == (False, 3, None)
    assert [line["resumes"] for line in (first, second, third)] == [0, 1, 2]
    assert (second["route"], second["resumed"], second["completion_tokens"]) == ("/v1/streams/{job}", True, 3)
    assert first["request_id"] == second["request_id"] == job


async def test_a_client_that_leaves_and_one_that_is_refused(deploy: Deploy, said: Lines) -> None:
    up = await deploy({"tokens_per_s": 20.0}, api={"grace_s": 0}, keys=[ALICE])
    mine = {"authorization": "Bearer a-key-of-alice"}
    body = up.body(stream=True, max_tokens=500)
    async with up.http.stream("POST", up.pods[0].url + "/v1/chat/completions", json=body, headers=mine) as response:
        await anext(response.aiter_raw())
    [left] = await said.requests(1)
    assert (left["outcome"], left["status"], left["owner"], left["attempts"]) == ("disconnected", 200, "alice", 1)
    await up.post()
    await up.post(headers=mine, temperature=99)
    await up.ask("GET", "/nowhere?secret=1", headers=mine)
    refused = (await said.requests(4))[1:]
    assert [(line["outcome"], line["status"], line["route"]) for line in refused] == [
        ("invalid_api_key", 401, "/v1/chat/completions"),
        ("invalid_request", 400, "/v1/chat/completions"),
        ("not_found", 404, "/nowhere"),
    ]
    assert all(line["duration_ms"] >= 0 for line in refused)
    assert "a-key-of-alice" not in said.text and "secret" not in said.text


class SayingEngine(ScriptedEngine):
    """An engine that fails with what it was asked."""

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        run = super().start(generation, emit, fail)
        fail(ValueError(f"cannot do {generation.job.prompt}"))
        return run


async def ask_everything(up: Deployment) -> None:
    messages = [{"role": "user", "content": SECRET}]
    await up.post(messages=messages)
    await up.stream(messages=messages, stop=[SECRET])
    await up.post(messages=messages, temperature=SECRET)
    await up.ask("POST", "/v1/chat/completions", content=b'{"' + SECRET.encode())
    await up.ask("GET", f"/chat?prompt={SECRET}")
    await up.ask("POST", "/v1/messages", json={"model": SECRET, "messages": messages, "max_tokens": 3})
    await up.ask("GET", f"/v1/streams/x?after={SECRET}")


@pytest.mark.parametrize("engine", [ScriptedEngine, SayingEngine])
async def test_no_line_at_info_or_above_shows_a_prompt(
    deploy: Deploy, said: Lines, engine: Callable[[ScriptedModel], ScriptedEngine]
) -> None:
    up = await deploy(engine=engine)
    await ask_everything(up)
    assert len(await said.requests(7)) == 7
    assert SECRET not in said.text
    failures = said.of("job_failed")
    assert len(failures) == (3 if engine is SayingEngine else 0)
    assert all("ValueError" in line["error"] and line["request_id"] for line in failures)


async def test_a_bug_in_a_pod_is_told_twice_and_what_it_says_never(
    deploy: Deploy, said: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By us, and by the server, to which it goes on."""
    up = await deploy()

    async def admit(admission: Admission) -> None:
        raise ValueError(f"cannot admit {admission.job.prompt}")

    monkeypatch.setattr(up.state().broker, "admit", admit)
    answer = await up.post(messages=[{"role": "user", "content": SECRET}], headers={"x-request-id": "order-7"})
    assert answer.status == 500
    [line] = await said.requests(1)
    assert (line["outcome"], line["status"], line["user_request_id"]) == ("internal_error", 500, "order-7")
    await eventually(lambda: said.text.count("ValueError: (its message") == 2)
    assert SECRET not in said.text
    assert said.of("request_failed")[0]["request_id"] == "order-7"


async def test_a_lost_worker_is_one_line_and_two_attempts(deploy: Deploy, said: Lines) -> None:
    up = await deploy({"tokens_per_s": 50.0}, workers=2)
    async with up.open(max_tokens=20) as opened:
        await opened.until(b"content")
        [busy] = [worker for worker in up.workers if worker.running]
        drained = asyncio.create_task(up.drain(busy))
        await opened.rest()
        await drained
    [line] = await said.requests(1)
    assert (line["attempts"], line["completion_tokens"]) == (2, 20)
    [takeover] = said.of("failover")
    assert (takeover["outcome"], takeover["attempt"], takeover["request_id"]) == ("continued", 2, opened.job)
    assert said.of("job_done", "job_admitted") == []


async def test_every_field_is_explained(deploy: Deploy, said: Lines) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing-and-logs.md").read_text("utf-8")
    up = await deploy()
    headers = {"idempotency-key": "a", "x-request-id": "b"}
    for _ in range(2):
        await up.post(max_tokens=2, headers=headers)
    await up.resume((await up.post(max_tokens=2)).headers["x-request-id"])
    for line in await said.requests(4):
        assert {name for name in line if f"`{name}`" not in page} == set()
