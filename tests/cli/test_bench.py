"""The load generator against a real pod, and what it must notice."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner, Result

from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import Unavailable
from headrace.broker.settings import Settings
from headrace.cli import bench
from headrace.cli.bench_ready import wait_ready
from headrace.cli.bench_report import Report, quantiles_ms
from headrace.cli.load import Load
from headrace.cli.load_checks import OracleCheck, OrderCheck
from headrace.cli.load_plan import Plan
from headrace.cli.processes import processes, usage
from tests.serving import Pod, scripted_settings, serving
from tests.support import eventually


def a_plan(pods: list[Pod]) -> Plan:
    return Plan([pod.url for pod in pods], "scripted", streams=20, requests=40, max_tokens=25)


@pytest.fixture
def settings(redis_server: EmbeddedServer) -> Settings:
    return scripted_settings(redis_server, tokens_per_s=200)


async def test_a_closed_loop_finds_every_token_right(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server) as pods:
        told = await bench.bench(settings, a_plan(pods), until_ready_s=10)
    assert (told.requests, told.done, told.errors, told.mismatches) == (40, 40, {}, 0)
    assert told.tokens == 40 * 25
    assert 0 < told.ttft_ms["p50"] <= told.ttft_ms["p99"]
    assert 0 < told.itl_ms["p50"] <= told.itl_ms["p99"]
    assert told.is_clean
    assert sorted(cost.role for cost in told.processes) == ["broker", "pod", "replica"]
    assert told.client.cpu_us_per_token > 0


async def test_streams_that_are_cut_and_resumed_are_right(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server, pods=2) as pods:
        totals = await Load(replace(a_plan(pods), resume_every=4)).run()
    assert (totals.done, totals.errors, totals.mismatches) == (40, {}, 0)
    assert totals.resumes == 40 * (25 // 4)


async def test_a_wrong_token_is_a_mismatch(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server) as pods:
        plan = replace(a_plan(pods), check=lambda text, seed: OracleCheck(text, seed + 1))
        told = await bench.bench(settings, plan)
    assert (told.done, told.mismatches, told.errors) == (0, 40, {"mismatch": 40})
    assert not told.is_clean


async def test_a_stream_that_ends_early_is_a_mismatch(redis_server: EmbeddedServer, settings: Settings) -> None:
    class Greedy(OracleCheck):
        def end(self, max_tokens: int, completion_tokens: int) -> bool:
            return super().end(max_tokens + 1, completion_tokens)

    async with serving(settings, redis_server) as pods:
        totals = await Load(replace(a_plan(pods), check=Greedy)).run()
    assert (totals.done, totals.mismatches, totals.tokens) == (0, 40, 40 * 25)


async def test_an_open_loop_arrives_at_its_rate(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server) as pods:
        plan = replace(a_plan(pods), streams=None, rate=200.0, requests=None, duration_s=0.5, check=OrderCheck)
        totals = await Load(plan).run()
    assert (totals.errors, totals.mismatches) == ({}, 0)
    assert 5 < totals.begun == totals.done < 200  # a busy machine begins fewer
    assert totals.tokens == totals.done * 25


async def test_errors_are_counted_by_their_code(redis_server: EmbeddedServer, settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with serving(settings, redis_server) as pods:
            plan = replace(a_plan(pods), model="nobody", requests=4)
            totals = await Load(replace(plan, urls=[*plan.urls, closed])).run()
    assert totals.errors == {"model_not_found": 2, "cannot_connect": 2}


async def test_a_pod_that_dies_is_an_error_of_its_streams(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server) as pods:
        load = Load(replace(a_plan(pods), requests=20, max_tokens=10_000))
        running = asyncio.create_task(load.run())
        await eventually(lambda: len(load.totals.ttft) == 20)
        pods[0].die()
        totals = await running
    assert totals.errors == {"connection_lost": 20}


async def test_what_is_not_ready_is_named(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server) as pods:
        plan = replace(a_plan(pods), urls=[pods[0].url, "http://127.0.0.1:9"], model="other")
        with pytest.raises(Unavailable, match=r"not ready after 0\.1 s: http://127\.0\.0\.1:9, a replica of other"):
            await wait_ready(settings, plan, 0.1)


async def test_the_processes_of_this_host_are_found(redis_server: EmbeddedServer, settings: Settings) -> None:
    async with serving(settings, redis_server, pods=2):
        found = await processes(settings)
    assert redis_server.process is not None
    assert found[0] == {"role": "broker", "pid": redis_server.process.pid}
    assert [(each["role"], each["pid"]) for each in found[1:]] == [
        (role, os.getpid()) for role in ("pod", "pod", "replica")
    ]


def test_usage_is_of_processes_that_are_there() -> None:
    used = usage([os.getpid(), 2**22 + 1])
    assert list(used) == [os.getpid()]
    assert used[os.getpid()].cpu_s > 0
    assert used[os.getpid()].rss_bytes > 1 << 20


def test_order_allows_gaps_and_refuses_what_came_before() -> None:
    check = OrderCheck("", 0)
    places = [b"j.1-2.1", b"j.1-2.2", b"j.1-2", b"j.1-9", b"j.2-1", b"j.2-1", b"j.1-99", b""]
    assert [check.push(place, "x") for place in places] == [True] * 5 + [False] * 3


def test_quantiles_are_in_milliseconds() -> None:
    assert quantiles_ms([n / 1000 for n in range(1, 101)]) == {"p50": 51.0, "p95": 96.0, "p99": 100.0}
    assert quantiles_ms([]) == {"p50": 0.0, "p95": 0.0, "p99": 0.0}


@pytest.fixture
def config(settings: Settings, tmp_path: Path) -> str:
    file = tmp_path / "headrace.yaml"
    file.write_bytes(msgspec.json.encode({"models": settings.models, "data_dir": settings.data_dir}))
    return str(file)


async def invoke(*args: str) -> Result:
    """The command as a user runs it, beside the pods: on a thread of its own."""
    app = typer.Typer()
    app.command()(bench.command)
    return await asyncio.to_thread(CliRunner().invoke, app, [*args])


async def test_the_command_reports_as_json(redis_server: EmbeddedServer, settings: Settings, config: str) -> None:
    async with serving(settings, redis_server) as [pod]:
        args = ("--requests", "5", "--max-tokens", "5", "--json")
        result = await invoke("--config", config, "--url", pod.url, *args)
    assert result.exit_code == 0, result.output
    told = msgspec.json.decode(result.stdout, type=Report)
    assert (told.done, told.tokens, told.is_clean) == (5, 25, True)


async def test_the_command_exits_with_1_on_error(redis_server: EmbeddedServer, settings: Settings, config: str) -> None:
    async with serving(settings, redis_server) as [pod]:
        result = await invoke("--config", config, "--url", pod.url, "--requests", "3", "--model", "nobody")
    assert result.exit_code == 1
    assert "model_not_found 3" in result.stdout


async def test_two_kinds_of_load_at_once_are_refused(config: str) -> None:
    assert (await invoke("--config", config, "--streams", "2", "--rate", "5")).exit_code == 2
