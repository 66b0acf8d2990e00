"""More than can be served: who is refused, with which words, and that a storm of retries leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest
import redis

from headrace.broker import keys
from headrace.broker.settings import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, Opened, count
from tests.api.reading import content, errors
from tests.support import eventually

streams = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])

SLOW = {"slots": 1, "tokens_per_s": 20.0}
QUICK_HEADERS = {"grace_s": 0, "headers_after_ms": 50}


def a_key(owner: str, **fields: int) -> KeySettings:
    return KeySettings(owner=owner, sha256=hashlib.sha256(owner.encode()).hexdigest(), **fields)  # type: ignore[arg-type]


def bearing(owner: str, **headers: str) -> dict[str, str]:
    return {"authorization": f"Bearer {owner}", **headers}


@contextlib.asynccontextmanager
async def busy(up: Deployment) -> AsyncIterator[Opened]:
    """The one slot is taken, and stays so."""
    async with up.open(max_tokens=5000) as running:
        yield running


async def waits(up: Deployment, many: int = 1) -> None:
    async def is_waiting() -> bool:
        return sum((await up.broker.stats("scripted")).waiting.values()) == many

    await eventually(is_waiting)


def load(client: redis.Redis) -> dict[str, int]:
    found = client.hgetall(keys.key("load", 0, "scripted"))
    return {name.decode(): int(value) for name, value in found.items()}  # type: ignore[union-attr]


# -- refused ---------------------------------------------------------------------------------------------------------


@streams
async def test_no_capacity_says_when_to_come_back(deploy: Deploy, stream: bool) -> None:
    up = await deploy(workers=0)
    answer = await up.post(stream=stream)
    assert (answer.status, answer.error["code"]) == (503, "no_capacity")
    assert answer.headers["retry-after"] == "5"


@streams
async def test_an_owner_at_its_bound_is_refused_and_others_are_not(deploy: Deploy, stream: bool) -> None:
    up = await deploy(SLOW, api=QUICK_HEADERS, keys=[a_key("alice", max_waiting_jobs=1), a_key("bob")])
    before = count("headrace_rejections_total", reason="owner_queue_full")
    async with contextlib.AsyncExitStack() as open_streams:
        for owner in ("bob", "alice", "bob"):
            body, url = up.body(stream=True, max_tokens=5000), up.pods[0].url + "/v1/chat/completions"
            await open_streams.enter_async_context(up.http.stream("POST", url, json=body, headers=bearing(owner)))
        await waits(up, 2)
        answer = await up.post(stream=stream, headers=bearing("alice"))
    assert (answer.status, answer.error["type"]) == (429, "rate_limit_error")
    assert (answer.error["code"], answer.error["param"]) == ("owner_queue_full", None)
    assert "1 of your requests" in answer.error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert count("headrace_rejections_total", reason="owner_queue_full") == before + 1


async def test_a_large_prompt_meets_the_bound_in_tokens(deploy: Deploy) -> None:
    up = await deploy(SLOW, {"max_waiting_tokens": 300}, QUICK_HEADERS)
    async with busy(up), up.open(prompt="", messages=[{"role": "user", "content": "x" * 1000}]):
        await waits(up)
        answer = await up.post()
    assert (answer.status, answer.error["code"]) == (429, "queue_full")


# -- batch -----------------------------------------------------------------------------------------------------------


@streams
async def test_a_batch_request_that_makes_room_gets_a_429(deploy: Deploy, stream: bool) -> None:
    up = await deploy(SLOW, {"max_waiting_jobs": 1}, {"grace_s": 0, "headers_after_ms": 5000 if stream else 50})
    async with busy(up):
        waiting = asyncio.create_task(up.post(stream=stream, headers={"x-priority": "batch"}))
        await waits(up)
        better = asyncio.create_task(up.post(max_tokens=1))
        answer = await waiting
        better.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await better
    assert (answer.status, answer.error["type"], answer.error["code"]) == (429, "rate_limit_error", "queue_full")
    assert "made room" in answer.error["message"]
    assert answer.headers["retry-after"] == "5"


async def test_a_batch_stream_that_makes_room_after_its_headers_says_so_in_the_stream(deploy: Deploy) -> None:
    up = await deploy(SLOW, {"max_waiting_jobs": 1}, QUICK_HEADERS)

    async def batch() -> Answer:
        async with up.open(service_tier="flex") as opened:
            await opened.until(b"queued")
            is_queued.set()
            return await opened.rest()

    is_queued = asyncio.Event()
    async with busy(up):
        waiting = asyncio.create_task(batch())
        await is_queued.wait()
        async with up.open():
            answer = await waiting
    [error] = errors(answer.events)
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    assert content(answer.events) == ""


# -- the queue's deadline --------------------------------------------------------------------------------------------


@streams
@pytest.mark.parametrize("text", ["0", "-1", "300.5", "soon", "", "nan", "inf"])
async def test_a_queue_timeout_out_of_its_bounds_is_refused(deploy: Deploy, stream: bool, text: str) -> None:
    up = await deploy()
    answer = await up.post(stream=stream, headers={"x-queue-timeout": text})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_request", "X-Queue-Timeout")
    assert "at most 300 seconds" in answer.error["message"]
    assert up.recorded.told == []


async def test_a_queue_timeout_does_not_disturb_a_request_that_is_served(deploy: Deploy) -> None:
    up = await deploy()
    assert (await up.post(headers={"x-queue-timeout": "300"}, max_tokens=2)).status == 200


@streams
async def test_a_request_that_waited_for_its_queue_timeout_ends_as_timeout(deploy: Deploy, stream: bool) -> None:
    up = await deploy(SLOW, api={"grace_s": 0, "headers_after_ms": 60_000})
    async with contextlib.AsyncExitStack() as stack:
        running = asyncio.create_task(up.post(max_tokens=5000))
        stack.callback(running.cancel)
        await eventually(lambda: up.recorded.told)
        asked = asyncio.create_task(up.post(stream=stream, headers={"x-queue-timeout": "0.2"}))

        async def is_answered() -> bool:
            await up.broker.reap(0)
            return asked.done()

        await eventually(is_answered)
    answer = asked.result()
    assert (answer.status, answer.error["type"], answer.error["code"]) == (504, "server_error", "timeout")
    with contextlib.suppress(asyncio.CancelledError):
        await running


# -- a storm ---------------------------------------------------------------------------------------------------------


async def test_a_storm_of_retries_leaves_nothing_behind(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(SLOW, {"max_waiting_jobs": 1}, QUICK_HEADERS)
    before = count("headrace_rejections_total", reason="queue_full")
    async with busy(up) as running, up.open(max_tokens=2) as waiting:
        await waiting.until(b"queued")
        names, counted = set(redis_client.keys("hr:*")), load(redis_client)
        answers = await asyncio.gather(*(up.post(stream=number % 2 == 0) for number in range(200)))
        assert {answer.status for answer in answers} == {429}
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in answers)
        assert set(redis_client.keys("hr:*")) == names
        assert load(redis_client) == counted
        await up.ask("DELETE", f"/v1/streams/{running.job}")
        assert content((await waiting.rest()).events)
    assert count("headrace_rejections_total", reason="queue_full") == before + 200
    await eventually(up.is_idle)
    assert load(redis_client) == {}


async def test_the_prompt_tokens_that_wait_are_a_gauge(deploy: Deploy) -> None:
    up = await deploy(SLOW, api=QUICK_HEADERS)
    async with busy(up), up.open(messages=[{"role": "user", "content": "x" * 100}]):
        await waits(up)
        body = (await up.ask("GET", "/metrics")).body
    assert b'headrace_queue_prompt_tokens{model="scripted"} 30.0' in body
