"""E2: a failover in the middle of a response does not show in it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api import reading
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment, Opened
from tests.support import eventually
from tests.workers.replicas import oracle_text


async def lose_worker(up: Deployment, job: str) -> None:
    """Give the job to another attempt, behind the back of the replica that runs it."""
    status = await up.broker.status(job)
    assert status is not None
    attempt = status.attempt
    for worker in up.workers:
        await up.broker.release(worker.id, job, None, None)

    async def is_taken_up() -> bool:
        found = await up.broker.status(job)
        return found is not None and found.attempt > attempt

    await eventually(is_taken_up)


async def read_more(opened: Opened, count: int = 2000) -> None:
    target = len(opened.read) + count
    while len(opened.read) < target:
        opened.read += await anext(opened._parts)


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_e2_three_failovers_do_not_show_in_a_stream(deploy: Deploy, route: str) -> None:
    up = await deploy({"tokens_per_s": 100.0}, workers=2)
    wanted = {"logprobs": True, "top_logprobs": 2} if route == "chat" else {"logprobs": 2}
    fields: dict[str, Any] = {"max_tokens": 60, "n": 2, "stream_options": {"include_usage": True}, **wanted}
    async with up.open(route, **fields) as opened:
        for _ in range(3):
            await read_more(opened)
            await lose_worker(up, opened.job)
        answer = await opened.rest()
    frames = reading.frames(answer.events)
    assert len({frame["id"] for frame in frames}) == 1
    for index in (0, 1):
        assert reading.content(answer.events, index) == oracle_text("hi", 60, choice=index)
        choices = reading.choices(answer.events, index)
        if route == "chat":
            assert [choice["delta"].get("role") for choice in choices if "role" in choice["delta"]] == ["assistant"]
        assert [reason for reason in reading.finishes(answer.events, index) if reason] == ["length"]
        said = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        assert sum(len(each["content" if route == "chat" else "tokens"]) for each in said) == 60
    [usage] = [frame["usage"] for frame in frames if frame.get("usage")]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (1, 120)
    status = await up.broker.status(opened.job)
    assert status is not None
    assert (status.attempt, status.deaths) == (4, 0)


async def test_e2_a_response_in_one_piece_is_the_same_over_a_failover(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 100.0}, workers=2)
    undisturbed = await up.post(max_tokens=40, seed=3)
    async with up.open(max_tokens=40, seed=3) as opened:
        await read_more(opened, 500)
        await lose_worker(up, opened.job)
        streamed = await opened.rest()
    whole = undisturbed.json["choices"][0]["message"]["content"]
    assert reading.content(streamed.events) == whole == oracle_text("hi", 40, seed=3)
