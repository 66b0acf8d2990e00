"""The spans of requests, as a real collector gets them from real pods and replicas."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import pytest

from headrace.broker.settings import TracingSettings
from headrace.workers.worker import Worker
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Deployment, RecordingEngine
from tests.support import eventually

if not os.environ.get("CI"):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from tests.collector import Collector, Told

TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MakeTraced = Callable[..., Awaitable[Deployment]]


@pytest.fixture(autouse=True)
def nothing_is_told_later() -> Iterator[None]:
    """What a closed tracer still says from its thread would be in the log of the next test."""
    yield
    for thread in threading.enumerate():
        if thread.name == "tracing's end":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def traced(collector: Collector, deploy: Deploy) -> MakeTraced:
    """A deployment that tells the collector, soon, and ends before it."""

    async def make(
        model: dict[str, object] | None = None, *, pods: int = 1, workers: int = 1, **tracing: object
    ) -> Deployment:
        settings = {"endpoint": collector.url, "export_s": 0.05, **tracing}
        return await deploy(model or {}, pods=pods, workers=workers, tracing=settings)

    return make


def within(span: Told, other: Told) -> bool:
    """Clocks are read in whole milliseconds in a log."""
    return other.start_ms - 2 <= span.start_ms <= span.end_ms <= other.end_ms + 2


async def test_the_spans_of_one_request(traced: MakeTraced, collector: Collector) -> None:
    up = await traced({"tokens_per_s": 200.0})
    before_ms = time.time() * 1000
    answer = await up.stream(max_tokens=5, temperature=0.5)
    job = answer.headers["x-request-id"]
    await eventually(lambda: len(collector.spans) == 8)
    assert set(collector.paths) == {"/v1/traces"}
    assert sorted(collector.tree()) == sorted(
        [
            "POST /v1/chat/completions", ".admit", ".queue", ".chat scripted", "..dispatch", "..prefill", "..decode",
            ".relay",
        ]
    )  # fmt: skip
    whole, attempt = collector.one("POST /v1/chat/completions"), collector.one("chat scripted")
    assert len({span.trace_id for span in collector.spans}) == 1
    assert whole.parent == "" and attempt.links == whole.links == []
    assert before_ms - 1 <= whole.start_ms <= whole.end_ms <= time.time() * 1000 + 1
    assert answer.headers["traceresponse"] == f"00-{whole.trace_id}-{whole.span_id}-01"
    for span in collector.spans:
        assert within(span, whole), span
        assert span.service == ("headrace-pod" if span.name in ("admit", "relay", whole.name) else "headrace-worker")
    stages = [collector.one(name) for name in ("queue", "dispatch", "prefill", "decode")]
    for earlier, later in itertools.pairwise(stages):
        assert abs(earlier.end_ms - later.start_ms) < 2
    assert whole.kind == 2
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "headrace", "gen_ai.request.model": "scripted",
        "gen_ai.request.stream": True, "gen_ai.response.id": job, "gen_ai.usage.input_tokens": 1,
        "gen_ai.usage.output_tokens": 5, "http.request.method": "POST", "http.route": "/v1/chat/completions",
        "http.response.status_code": 200, "headrace.outcome": "ok", "headrace.attempts": 1,
    }  # fmt: skip
    assert expected.items() <= whole.attributes.items()
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "scripted", "gen_ai.response.id": job,
        "gen_ai.request.max_tokens": 5, "gen_ai.request.temperature": 0.5, "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"], "headrace.attempt": 1, "headrace.worker": up.workers[0].id,
        "headrace.outcome": "done",
    }  # fmt: skip
    assert expected.items() <= attempt.attributes.items()


async def test_the_trace_of_the_client_goes_through_to_the_engine(traced: MakeTraced, collector: Collector) -> None:
    up = await traced(sample_ratio=0.0)
    headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01", "tracestate": "vendor=a"}
    await up.stream(max_tokens=2, headers=headers)
    await up.stream(max_tokens=2)
    await eventually(lambda: len(collector.spans) == 8)
    assert {(span.trace_id, span.state) for span in collector.spans} == {(TRACE, "vendor=a")}
    assert collector.one("POST /v1/chat/completions").parent == ABOVE
    job = up.recorded.told[0].job
    assert job.traceparent == f"00-{TRACE}-{collector.one('chat scripted').span_id}-01"
    assert job.tracestate == "vendor=a"
    assert up.recorded.told[1].job.traceparent == ""


async def test_what_the_client_has_not_sampled_is_not_told_of(traced: MakeTraced, collector: Collector) -> None:
    up = await traced()
    unsampled = f"00-{TRACE}-{ABOVE}-00"
    answer = await up.stream(max_tokens=2, headers={"traceparent": unsampled})
    await up.ask("POST", PATHS["chat"], content=b"{", headers={"traceparent": unsampled})
    await up.resume(answer.headers["x-request-id"], after="")
    assert "traceresponse" not in answer.headers
    assert up.recorded.told[0].job.traceparent == unsampled, "else an engine would begin a trace of its own"
    await up.stream(max_tokens=2)  # is told of after those before
    await eventually(lambda: bool(collector.named("POST /v1/chat/completions")))
    assert TRACE not in {span.trace_id for span in collector.spans}


@pytest.mark.parametrize(
    "wrong",
    [
        f"00-{TRACE}-{ABOVE}",
        f"00-{TRACE.upper()}-{ABOVE}-01",
        f"ff-{TRACE}-{ABOVE}-01",
        f"00-{'0' * 32}-{ABOVE}-01",
        "x",
    ],
)
async def test_a_traceparent_that_is_none_begins_a_trace(traced: MakeTraced, collector: Collector, wrong: str) -> None:
    up = await traced()
    await up.post(max_tokens=1, headers={"traceparent": wrong})
    await eventually(lambda: len(collector.spans) == 8)
    assert collector.one("POST /v1/chat/completions").parent == ""
    assert TRACE not in {span.trace_id for span in collector.spans}


async def test_clients_need_not_be_followed(traced: MakeTraced, collector: Collector) -> None:
    up = await traced(follow_clients=False)
    await up.post(max_tokens=1, headers={"traceparent": f"00-{TRACE}-{ABOVE}-00"})
    await eventually(lambda: len(collector.spans) == 8)
    assert TRACE not in {span.trace_id for span in collector.spans}


def decoding(up: Deployment) -> list[Worker]:
    """The workers whose engine has made something of a job that they have."""
    pairs = zip(up.workers, up.engines, strict=True)
    return [worker for worker, engine in pairs if worker.running and cast(RecordingEngine, engine).steps]


async def test_attempts_follow_each_other_by_links(traced: MakeTraced, collector: Collector) -> None:
    up = await traced({"tokens_per_s": 50.0}, workers=3)
    async with up.open(max_tokens=40) as opened:
        for _ in range(2):
            await eventually(lambda: bool(decoding(up)))
            [busy] = decoding(up)
            await up.drain(busy)
        await opened.rest()
    await eventually(lambda: len(collector.spans) == 18)
    attempts = collector.named("chat scripted")
    assert [span.attributes["headrace.attempt"] for span in attempts] == [1, 2, 3]
    assert [span.attributes["headrace.outcome"] for span in attempts] == ["handed_over", "handed_over", "done"]
    assert len({span.attributes["headrace.worker"] for span in attempts}) == 3
    assert [span.links for span in attempts] == [[], *([(each.trace_id, each.span_id)] for each in attempts[:2])]
    assert [span.attributes["headrace.attempt"] for span in collector.named("queue")] == [1, 2, 3]
    whole = collector.one("POST /v1/chat/completions")
    assert whole.attributes["headrace.attempts"] == 3
    assert {span.parent for span in attempts} == {whole.span_id}
    decoded = collector.named("decode")
    assert [span.parent for span in decoded] == [span.span_id for span in attempts]
    assert all(earlier.end_ms <= later.start_ms + 2 for earlier, later in itertools.pairwise(attempts))


async def test_who_comes_back_links_to_the_request(traced: MakeTraced, collector: Collector) -> None:
    up = await traced({"tokens_per_s": 100.0}, pods=2, sample_ratio=1.0)
    async with up.open(max_tokens=10) as opened:
        rest = asyncio.create_task(up.resume(opened.job, pod=1))
        await opened.rest()
        await rest
    await eventually(lambda: bool(collector.named("relay")) and len(collector.spans) == 11)
    first, back = collector.one("POST /v1/chat/completions"), collector.one("GET /v1/streams/{job}")
    assert back.links == [(first.trace_id, first.span_id)]
    assert back.trace_id != first.trace_id
    assert collector.one("resume").parent == back.span_id
    assert back.attributes["gen_ai.usage.output_tokens"] == 10


async def test_a_refused_request_has_a_span(traced: MakeTraced, collector: Collector) -> None:
    up = await traced()
    await up.post(temperature=99)
    await eventually(lambda: len(collector.spans) == 1)
    [span] = collector.spans
    assert (span.name, span.attributes["http.response.status_code"]) == ("POST /v1/chat/completions", 400)
    assert span.attributes["headrace.outcome"] == "invalid_request"
    assert not span.is_error, "a server's span is an error from 500 on"


async def test_what_a_request_says_is_in_no_span(traced: MakeTraced, collector: Collector) -> None:
    up = await traced()
    secret = "the-prompt-of-somebody"
    await up.post(messages=[{"role": "user", "content": secret}], stop=[secret], user=secret)
    await eventually(lambda: len(collector.spans) == 8)
    assert secret not in repr(collector.spans)


async def test_nobody_waits_for_a_collector_that_is_away(deploy: Deploy) -> None:
    up = await deploy(tracing={"endpoint": "http://127.0.0.1:1", "export_s": 0.05})
    for _ in range(20):
        assert (await up.post(max_tokens=1)).status == 200


async def test_off_is_off(deploy: Deploy) -> None:
    up = await deploy()
    answer = await up.post(max_tokens=1, headers={"traceparent": f"00-{TRACE}-{ABOVE}-01"})
    assert "traceresponse" not in answer.headers
    assert up.recorded.told[0].job.traceparent == ""
    assert up.state().tracing is None and TracingSettings().endpoint is None
