"""What a replica tells Prometheus of its engine and its tokens, and where."""

from __future__ import annotations

import socket

import httpx
import msgspec
import pytest
from prometheus_client import REGISTRY

from headrace.broker import keys, metrics
from headrace.broker.errors import ConfigError
from headrace.broker.messages import Job, Text, View
from headrace.broker.models import ModelAutoscaling, ScriptedModel
from headrace.broker.protocol import Admission
from headrace.broker.settings import Settings, WorkerSettings
from headrace.workers.scrape import MetricsServer
from tests.support import eventually
from tests.workers.replicas import MakeStage, Stage


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"model": "m", **labels}) or 0.0


async def test_tokens_are_counted_while_they_are_made_and_once(make_stage: MakeStage) -> None:
    stage = await make_stage(drain_s=0.0)
    before = value("headrace_tokens_total", kind="completion")
    first = await stage.replica()
    job_id = await stage.admit()
    run = await first.run()
    run.say("a", "b")
    await eventually(lambda: value("headrace_tokens_total", kind="completion") == before + 2)
    await first.drain()
    second = await stage.replica()
    (await second.run()).say("c", end="eos")
    await stage.ended(job_id)
    await eventually(lambda: value("headrace_tokens_total", kind="completion") == before + 3)


async def test_tokens_that_nobody_reads_any_more_are_counted_apart(stage: Stage) -> None:
    before = value("headrace_unread_tokens_total")
    replica = await stage.replica()
    await stage.admit("nobody has ever read this")
    (await replica.run(0)).say("a", end="eos")
    job = Job(keys.new_job_id(1), "m", Text("hello"))
    await stage.plain.admit(Admission(job, View("alice", "m", "openai.chat"), "pod-1", 60_000))
    run = await replica.run(1)
    run.say("a", "b")
    await stage.plain.unwatch("pod-1", {job.id: None})
    await eventually(lambda: not replica.worker._runs[job.id].track.readers)
    run.say("c", "d", "e")
    await stage.plain.watch("pod-2", [job.id])
    await eventually(lambda: bool(replica.worker._runs[job.id].track.readers))
    run.say("f", end="eos")
    await stage.ended(job.id)
    await eventually(lambda: replica.worker.running == 0)
    assert value("headrace_unread_tokens_total") == before + 3


async def test_the_engines_figures_are_metrics_and_in_the_registry(stage: Stage) -> None:
    steps = value("headrace_engine_steps_total")
    replica = await stage.replica()
    await stage.admit("x" * 100)
    run = await replica.run()
    run.say("a")

    async def about() -> dict[str, str]:
        return (await stage.plain.listing("replicas"))[replica.worker.id]

    async def is_told() -> bool:
        return (await about()).get("batch") == "1"

    await eventually(is_told)
    assert value("headrace_engine_running") == 1
    assert value("headrace_engine_slots") == 4
    assert value("headrace_engine_kv_used_ratio") == pytest.approx(101 / 4000)
    assert value("headrace_engine_steps_total") == steps + 1
    assert (await about())["kv_percent"] == "3"
    run.say("b", end="eos")


@pytest.mark.parametrize(("ttft_slo_s", "outcome"), [(60.0, "met"), (1e-9, "missed")])
async def test_service_levels_are_judged_by_the_request(make_stage: MakeStage, ttft_slo_s: float, outcome: str) -> None:
    stage = await make_stage()
    chosen = ModelAutoscaling(ttft_slo_s=ttft_slo_s, tpot_slo_s=ttft_slo_s)
    model = msgspec.structs.replace(stage.settings.models[0], autoscaling=chosen)
    assert isinstance(model, ScriptedModel)
    stage.settings = msgspec.structs.replace(stage.settings, models=[model])
    before = [value("headrace_slo_requests_total", slo=slo, outcome=outcome) for slo in ("ttft", "tpot")]
    replica = await stage.replica()
    job_id = await stage.admit()
    run = await replica.run()
    run.say("a")
    run.say("b", end="eos")
    await stage.ended(job_id)
    await eventually(lambda: replica.worker.running == 0)
    after = [value("headrace_slo_requests_total", slo=slo, outcome=outcome) for slo in ("ttft", "tpot")]
    assert after == [each + 1 for each in before]


def settings(port: int | None) -> Settings:
    return Settings([ScriptedModel(name="m")], worker=WorkerSettings(metrics_port=port))


def test_replicas_of_one_host_take_neighbouring_ports() -> None:
    assert metrics.TOKENS
    first = MetricsServer(settings(0))
    host, _, port = first.location.partition(":")
    second = MetricsServer(settings(int(port)))
    try:
        assert host == "127.0.0.1"
        assert second.location != first.location
        for server in (first, second):
            answer = httpx.get(f"http://{server.location}/metrics")
            assert answer.status_code == 200
            assert "headrace_append_seconds_bucket" in answer.text
            assert "_created" not in answer.text
    finally:
        first.close()
        second.close()


def test_a_replica_that_is_to_have_no_metrics_has_none() -> None:
    assert MetricsServer(settings(None)).location == ""


def test_ports_that_are_all_taken_are_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 65_535))
        taken.listen()
        with pytest.raises(ConfigError, match="65535"):
            MetricsServer(settings(65_535))
