"""Under `headrace bench` with cut streams and a lost replica, pages, Prometheus and terminals say the same numbers."""

from __future__ import annotations

import bisect
import json
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.broker import figures, metrics
from tests.support import own_server
from tests.system.conftest import Machine, MakeMachine, answers, free_ports, scripted, until

BENCH = ("--streams", "20", "--requests", "60", "--max-tokens", "60", "--resume-every", "25", "--json")
UPPERS = figures.bounds(metrics.TIME_TO_FIRST_TOKEN)


class Scraped:
    """The sums of what several processes say at /metrics."""

    def __init__(self, urls: list[str]) -> None:
        self._samples = [
            sample
            for url in urls
            for family in text_string_to_metric_families(httpx.get(url).text)
            for sample in family.samples
        ]

    def by(self, name: str, label: str) -> dict[str, int]:
        """A metric's values by one of its labels, without zeros."""
        found: dict[str, int] = {}
        for sample in self._samples:
            if sample.name == name and sample.value:
                found[sample.labels[label]] = found.get(sample.labels[label], 0) + int(sample.value)
        return found

    def p95_bucket(self, name: str) -> int:
        """In which bucket the 95th percentile lies."""
        at_most = sorted((float(bound), count) for bound, count in self.by(f"{name}_bucket", "le").items())
        rank = 0.95 * at_most[-1][1]
        return UPPERS.index(next(bound for bound, count in at_most if count >= rank))


@pytest.fixture
def machine(make_machine: MakeMachine) -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, own_server(folder) as broker_url:
        settings: dict[str, object] = {
            "models": [scripted(tokens_per_s=60.0, slots=12)],
            "redis": {"url": broker_url},
            "worker": {"drain_s": 0.1},
        }
        made = make_machine(settings, pods=2)
        yield made
        made.end()


def test_all_say_the_same(machine: Machine) -> None:
    for port in machine.ports:
        machine.start("api", "--port", str(port))
    until(lambda: all(map(answers, machine.urls)), 30)
    ports = free_ports(3)
    workers = [machine.start("worker", "--metrics-port", str(port)) for port in ports]
    until(lambda: snapshot(machine)["models"][0]["states"]["ready"] == 3, 30)
    bench = machine.start("bench", *BENCH, *(f"--url={url}" for url in machine.urls))
    until(lambda: snapshot(machine)["models"][0]["running"] > 12, 30)
    workers[0].send_signal(signal.SIGTERM)  # its jobs go on at the others
    assert bench.wait(60) == 0, machine.said()
    told = json.loads(next(machine.folder.glob("bench-*.log")).read_text("utf-8"))
    workers[0].wait(20)
    pods = [f"{url}/metrics" for url in machine.urls]
    replicas = [f"http://127.0.0.1:{port}/metrics" for port in ports[1:]]

    def settled() -> bool:
        """What is published once a second is what there is to publish."""
        seen = snapshot(machine)
        requests = Scraped(pods).by("headrace_requests_total", "outcome")
        tokens = Scraped(replicas).by("headrace_tokens_total", "kind")
        total = seen["total"]
        return len(seen["replicas"]) == 2 and (total.get("requests"), total.get("tokens")) == (requests, tokens)

    until(settled, 15)
    page, scraped, made = snapshot(machine), Scraped(pods), Scraped(replicas)
    top = json.loads(machine.run("top", "--once", "--json").stdout)
    status = json.loads(machine.run("status", "--json").stdout)
    for view in (page, top, status):
        total = view["total"]
        assert total["requests"] == scraped.by("headrace_requests_total", "outcome")
        assert total["resumes"] == scraped.by("headrace_resumes_total", "outcome")
        assert total["failovers"] == made.by("headrace_failovers_total", "outcome")
        assert total["tokens"] == made.by("headrace_tokens_total", "kind")
        assert total["resumes"]["ok"] == told["resumes"]
        # each resume is a response too; one that was cut when all of it had been written counts as whole
        assert sum(total["requests"].values()) == told["requests"] + told["resumes"]
        assert total["requests"]["ok"] >= told["requests"]
        assert sum(total["failovers"].values()) > 0
    seen, of_status = page["models"][0], status["models"]["scripted"]
    for latency in (seen["ttft"], top["models"][0]["ttft"], of_status["ttft"]):
        bucket = bisect.bisect_left(UPPERS, latency["p95_ms"] / 1000)
        assert bucket == made.p95_bucket("gen_ai_server_time_to_first_token_seconds")
    shown = machine.run("top", "--once").stdout.replace("\n", " ")
    requests = sum(page["total"]["requests"].values())
    assert f"requests {requests} ({requests})" in " ".join(shown.split())
    assert [pod["requests"] for pod in page["pods"]] == [pod["requests"] for pod in top["pods"]]


def snapshot(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{machine.urls[0]}/ops/snapshot", timeout=10).json()
    return found
