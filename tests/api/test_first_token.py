"""Where a first token's time went: the stages of a request, and what is observed of them."""

from __future__ import annotations

import time

import pytest

from headrace.api.first_token import STAGES, FirstToken
from headrace.api.stages import Stages
from headrace.broker.messages import AnyEvent, Claimed, Delta, Queued, ReadEntry, Started
from tests.api.conftest import Deploy
from tests.api.deployment import count
from tests.support import eventually

NAME = "headrace_ttft_stage_seconds"


def entry(at_ms: int, *events: AnyEvent, id: str = "1-1") -> ReadEntry:
    return ReadEntry(id, at_ms, list(events))


def noted(*entries: ReadEntry) -> tuple[FirstToken, Stages]:
    """A request that was a quarter of a second old when it had been admitted, and its log."""
    stages = Stages()
    for each in entries:
        stages.note(each)
    return FirstToken(time.monotonic() - 0.25), stages


LOG = (
    entry(0, Queued(1)),
    entry(2000, Claimed("r", "0-1")),
    entry(2010, Started(5)),
    entry(3000, Delta(0, "", [1])),
    entry(3010, Delta(0, "x", [2])),
    entry(9000, Delta(0, "y", [3])),
)


def test_each_stage_has_its_part_and_the_sum_is_the_time_to_first_token() -> None:
    first, stages = noted(*LOG)
    first.arrived_at, first.written_at = first.admitted_at + 3.03, first.admitted_at + 3.05
    parts = first.seconds(stages)
    assert list(parts) == list(STAGES)
    assert parts == pytest.approx(
        {"admit": 0.25, "queue": 2.0, "dispatch": 0.01, "prefill": 1.0, "append": 0.02, "relay": 0.02}, abs=1e-3
    )
    assert sum(parts.values()) == pytest.approx(first.written_at - first.accepted_at)


def test_clocks_that_disagree_make_no_negative_part_and_no_other_sum() -> None:
    first, stages = noted(*LOG)
    first.arrived_at, first.written_at = first.admitted_at + 2.5, first.admitted_at + 2.6
    parts = first.seconds(stages)
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(first.written_at - first.accepted_at)


def test_a_worker_that_is_lost_before_the_first_token_has_cost_dispatch() -> None:
    claimed = entry(5000, Claimed("s", "1-1"), id="2-0")
    first, stages = noted(*LOG[:3], claimed, entry(5020, Started(5)), entry(5100, Delta(0, "x", [1])))
    first.arrived_at = first.written_at = first.admitted_at + 5.1
    parts = first.seconds(stages)
    assert [round(parts[stage], 2) for stage in ("queue", "dispatch", "prefill")] == [2.0, 3.02, 0.08]


def test_there_are_no_parts_without_a_token() -> None:
    first, stages = noted(*LOG[:4])
    assert first.seconds(stages) == {}


@pytest.mark.parametrize("coalesce", [None, "20"])
async def test_a_streams_stages_add_up_to_what_its_client_has_waited(deploy: Deploy, coalesce: str | None) -> None:
    name = f"stages-{coalesce}"
    up = await deploy({"name": name, "tokens_per_s": 100.0, "prefill_tokens_per_s": 100.0})
    headers = {"x-coalesce-ms": coalesce} if coalesce else {}
    began = time.monotonic()
    body = up.body(messages=[{"role": "user", "content": "x" * 80}], stream=True, max_tokens=30)
    async with up.http.stream("POST", f"{up.pods[0].url}/v1/chat/completions", json=body, headers=headers) as answer:
        parts, read = answer.aiter_raw(), b""
        while b'"content":" ' not in read:
            read += await anext(parts)
        waited_s = time.monotonic() - began
        async for _ in parts:
            pass
    counts = [count(f"{NAME}_count", model=name, stage=stage) for stage in STAGES]
    assert counts == [1.0] * len(STAGES)
    sums = {stage: count(f"{NAME}_sum", model=name, stage=stage) for stage in STAGES}
    assert sums["prefill"] > 0.18  # 20 tokens at 100 a second
    inside = count("gen_ai_server_time_to_first_token_seconds_sum", model=name, stream="true")
    assert inside - 0.01 <= sum(sums.values()) <= waited_s  # a log's times are whole milliseconds


async def test_only_the_request_that_made_the_job_is_measured(deploy: Deploy) -> None:
    up = await deploy({"name": "stages-once", "tokens_per_s": 100.0}, pods=2)
    async with up.open(max_tokens=20) as opened:
        resumed = await up.resume(opened.job, pod=1)
        assert resumed.status == 200
        await opened.rest()
    await up.post(max_tokens=3)  # in one piece: its client sees no first token
    assert count(f"{NAME}_count", model="stages-once", stage="relay") == 1
    await eventually(up.is_idle)
