"""A worker that is killed cannot tell its spans; its successor does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker.embedded import EmbeddedServer
from tests.system.conftest import Machine, MakeMachine, answers, scripted, until
from tests.system.reading import chat, resume

if not os.environ.get("CI"):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from tests.collector import Collector

TOKENS = 160
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "a-secret-prompt"}], "max_tokens": TOKENS}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def machine(make_machine: MakeMachine, collector: Collector) -> Iterator[Machine]:
    """A broker, a pod and two workers, which trace and log JSON."""
    settings = {
        "models": [scripted(tokens_per_s=40)],
        "queue": {"lease_s": 1.0},
        "tracing": {"endpoint": collector.url, "export_s": 0.1},
        "log_format": "json",
    }
    machine = make_machine(settings)
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder))
        runner.run(server.start())
        machine.start("api")
        machine.start("worker")
        machine.start("worker")
        until(lambda: answers(machine.urls[0]), 20)
        until(lambda: len(machine.pids("replica")) == 2, 20)
        yield machine
        machine.end()
        runner.run(server.stop())


def lines(machine: Machine, *events: str) -> list[dict[str, Any]]:
    said = [json.loads(line) for line in machine.said().splitlines() if line.startswith("{")]
    return [line for line in said if line["event"] in events]


def test_a_killed_worker_has_its_span_and_its_line(machine: Machine, collector: Collector) -> None:
    first = chat(machine.urls[0], BODY, stop_after=4)
    [(name, pid)] = until(lambda: _busy(machine), 3)
    os.kill(pid, signal.SIGKILL)
    rest = resume(machine.urls[0], first)
    assert rest.is_done
    until(lambda: len(collector.named("chat scripted")) == 2, 10)
    lost, kept = collector.named("chat scripted")
    assert (lost.attributes["headrace.worker"], lost.attributes["headrace.outcome"]) == (name, "handed_over")
    assert kept.attributes["headrace.worker"] != name
    assert kept.links == [(lost.trace_id, lost.span_id)]
    assert lost.end_ms <= collector.named("queue")[1].start_ms + 2
    until(lambda: bool(collector.named("GET /v1/streams/{job}")), 10)
    asked, back = collector.one("POST /v1/chat/completions"), collector.one("GET /v1/streams/{job}")
    assert {lost.parent, kept.parent} == {asked.span_id}
    assert back.links == [(asked.trace_id, asked.span_id)]
    [left, told] = until(lambda: lines(machine, "request"), 10)
    assert (left["outcome"], left["attempts"]) == ("disconnected", 1)
    assert (told["outcome"], told["resumed"], told["attempts"], told["completion_tokens"]) == ("ok", True, 2, TOKENS)
    [takeover] = lines(machine, "failover")
    assert (takeover["outcome"], takeover["attempt"]) == ("continued", 2)
    assert {line["request_id"] for line in (left, told, takeover)} == {first.job}
    assert "a-secret-prompt" not in machine.said()


def _busy(machine: Machine) -> list[tuple[str, int]]:
    """The replicas that run something, with their processes."""
    replicas: dict[str, dict[str, str]] = json.loads(machine.run("status", "--json").stdout)["replicas"]
    return [(name, int(about["pid"])) for name, about in replicas.items() if int(about["running"])]
