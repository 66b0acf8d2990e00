"""G1: what a time to first token is, and of which requests there is one."""

from __future__ import annotations

import time

import pytest

from tests.api.conftest import Deploy
from tests.api.deployment import Deployment, count
from tests.api.test_case_e2 import lose_worker, read_more
from tests.support import eventually

TTFT = "gen_ai_server_time_to_first_token_seconds"


def firsts(up: Deployment, stream: str = "true") -> float:
    return count(f"{TTFT}_count", model=up.settings.models[0].name, stream=stream)


@pytest.mark.parametrize("stream", ["true", "false"])
async def test_g1_it_runs_from_admission_to_the_first_token_queue_and_prefill_included(
    deploy: Deploy, stream: str
) -> None:
    name = f"g1-{stream}"
    up = await deploy({"name": name, "slots": 1, "tokens_per_s": 20.0, "prefill_tokens_per_s": 10.0})
    async with up.open(max_tokens=4) as before:  # a quarter of a second of queue for the next one
        await before.until(b"role")
        began = time.monotonic()
        answer = await (up.stream if stream == "true" else up.post)(max_tokens=4)
        took_s = time.monotonic() - began
        await before.rest()
    assert answer.status == 200
    assert firsts(up, stream) == 2 - (stream == "false")
    waited = count("headrace_queue_wait_seconds_sum", model=name)
    observed = sum(count(f"{TTFT}_sum", model=name, stream=each) for each in ("true", "false"))
    assert waited > 0.1 and observed > waited + 2 * 0.09  # a prompt token takes 0.1 s
    if stream == "false":  # its first token inside the replica, not its last
        assert count(f"{TTFT}_sum", model=name, stream="false") < took_s - 3 * 0.05 + 0.01


async def test_g1_who_gets_no_token_is_not_observed(deploy: Deploy) -> None:
    up = await deploy({"name": "g1-none", "slots": 1, "tokens_per_s": 50.0, "context_tokens": 100})
    async with up.open(max_tokens=90) as running:
        await running.until(b'content":" ')
        body = up.body(stream=True)
        async with up.http.stream("POST", f"{up.pods[0].url}/v1/chat/completions", json=body) as waiting:
            job = waiting.headers["x-request-id"]
            assert await up.state_of(job) == "waiting"
            await up.ask("DELETE", f"/v1/streams/{job}")
            await waiting.aread()
        await up.ask("DELETE", f"/v1/streams/{running.job}")
        await running.rest()
    refused = await up.post(messages=[{"role": "user", "content": "x" * 1000}])
    assert refused.status == 400
    assert firsts(up) + firsts(up, "false") == 1  # the one that was cancelled after its second token
    assert count("headrace_cancellations_total", cause="delete") >= 2


async def test_g1_a_failover_and_a_resume_are_observed_once(deploy: Deploy) -> None:
    up = await deploy({"name": "g1-once", "tokens_per_s": 100.0}, workers=2, pods=2)
    async with up.open(max_tokens=40) as opened:
        await read_more(opened, 500)
        await lose_worker(up, opened.job)
        resumed = await up.resume(opened.job, pod=1)
        assert resumed.status == 200
        await opened.rest()
    await eventually(up.is_idle)
    assert firsts(up) == 1
    assert count("headrace_slo_requests_total", model="g1-once", slo="ttft", outcome="met") == 1
