"""Cases D1, D2, D4 and D6: what a client's leaving, or its silence, means for the worker, the queue and the pod."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest
import redis

from headrace.broker import keys, messages
from headrace.broker.messages import Ended
from headrace.broker.tail import Reader
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.api.sockets import TAKES_LITTLE, Clock, RawClient, send, sent
from tests.support import eventually
from tests.workers.replicas import oracle_text

SLOW = {"slots": 1, "tokens_per_s": 50.0}
SILENT = {"slots": 1, "prefill_tokens_per_s": 0.01}
NO_GRACE = {"grace_s": 0.0}
HI = [{"role": "user", "content": "hi"}]

Leave = Callable[[RawClient], None]
LEAVINGS = pytest.mark.parametrize("leave", [RawClient.close, RawClient.reset], ids=["FIN", "RST"])


async def is_cancelled_within(up: Deployment, within_s: float) -> None:
    """The worker stops, and its slot is free."""
    await eventually(lambda: up.workers[0].running == 0, within_s)


async def only_end(up: Deployment, job: str) -> Ended:
    """The job's one terminal event, which is the last of its log."""
    rows = await up.broker.read(job, "0-1", 10_000)
    events = [event for entry_id, data in rows for event in messages.decode_entry(entry_id, data).events]
    [ended] = [event for event in events if isinstance(event, Ended)]
    assert events[-1] is ended
    return ended


async def some_job(up: Deployment, redis_client: redis.Redis) -> str:
    """The job of the one request that was made."""
    [name] = redis_client.scan_iter(match="hr:{0000}:job:*")
    return bytes(name).decode()[-32:]


# -- D1 ---------------------------------------------------------------------------------------------------------------


@LEAVINGS
async def test_d1_a_client_that_leaves_stops_the_worker(
    deploy: Deploy, redis_client: redis.Redis, leave: Leave
) -> None:
    up = await deploy(SLOW, api=NO_GRACE)
    client = await send(up, stream=True, max_tokens=10_000)
    await client.tokens(3)
    leave(client)
    await is_cancelled_within(up, 1.0)
    assert up.recorded.tokens <= 3 + 50 + 1
    ended = await only_end(up, client.job)
    assert (ended.status, ended.error and ended.error.code) == ("cancelled", "cancelled")
    for kind in ("job", "log"):
        assert 0 < redis_client.pttl(keys.key(kind, 0, client.job)) <= 600_000
    answer = await up.post(messages=HI, max_tokens=2)
    assert answer.json["choices"][0]["message"]["content"] == oracle_text("hi", 2)


@LEAVINGS
async def test_d1_a_client_that_leaves_before_the_first_token_stops_the_worker(
    deploy: Deploy, redis_client: redis.Redis, leave: Leave
) -> None:
    up = await deploy(SILENT, api=NO_GRACE)
    client = await send(up, stream=True)
    await eventually(lambda: up.recorded.told)
    leave(client)
    await is_cancelled_within(up, 1.0)
    assert (await only_end(up, await some_job(up, redis_client))).status == "cancelled"
    assert up.recorded.tokens == 0


async def test_d1_a_client_that_leaves_before_it_is_admitted_leaves_nothing(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy(SILENT, api=NO_GRACE)
    for leave in (RawClient.close, RawClient.reset):
        leave(await send(up, stream=True))

    async def are_over() -> bool:
        return await up.is_idle() and up.state().tail.readers == 0

    await eventually(are_over)


async def test_d1_half_a_close_is_no_leaving(deploy: Deploy) -> None:
    up = await deploy(SLOW, api=NO_GRACE)
    async with sent(up, stream=True, messages=HI, max_tokens=20) as client:
        await client.tokens(3)
        client.half_close()
        body = await client.until(b"data: [DONE]\n\n")
        assert body.count(b'"content":" ') == 20
        clock = Clock()
        await client.rest()
        assert clock.now < 1.0  # nothing more can be asked on it, so it is closed
        assert await up.state_of(client.job) == "done"


async def test_d1_half_a_close_right_after_the_request_is_no_leaving(deploy: Deploy) -> None:
    up = await deploy(SLOW, api=NO_GRACE)
    for _ in range(5):
        async with sent(up, stream=True, messages=HI, max_tokens=5) as client:
            client.half_close()
            body = await client.rest()
            assert body.count(b'"content":" ') == 5
            assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_d1_half_a_close_of_another_request_is_answered_or_closed(deploy: Deploy) -> None:
    up = await deploy(SLOW, api=NO_GRACE)
    async with sent(up, stream=True, model="nobody") as client:
        client.half_close()
        assert b"model_not_found" in await client.rest()


@pytest.mark.parametrize("is_back_in_time", [True, False])
async def test_d1_a_reader_may_come_back_in_the_grace_time(deploy: Deploy, is_back_in_time: bool) -> None:
    # what has run out is looked for from the first lease time on
    up = await deploy(SLOW, {"lease_s": 1.0}, {"grace_s": 2.0}, pods=2)
    client = await send(up, stream=True, messages=HI, max_tokens=150 if is_back_in_time else 500)
    await client.tokens(3)
    client.reset()
    clock = Clock()
    await eventually(lambda: clock.now > 1.0)
    assert up.workers[0].running == 1
    if not is_back_in_time:
        await is_cancelled_within(up, 2.5)
        assert clock.now > 1.9
        assert await up.state_of(client.job) == "cancelled"
        return
    answer = await up.resume(client.job, pod=1)
    text = "".join(event.json["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == oracle_text("hi", 150)
    assert await up.state_of(client.job) == "done"


# -- D2 ---------------------------------------------------------------------------------------------------------------


async def depth(up: Deployment) -> int:
    text = (await up.ask("GET", "/metrics")).body.decode()
    [line] = [
        line for line in text.splitlines() if line.startswith('headrace_queue_depth{model="scripted",priority="d')
    ]
    return round(float(line.split()[-1]))


@LEAVINGS
async def test_d2_a_request_whose_client_left_the_queue_is_never_run(
    deploy: Deploy, redis_client: redis.Redis, leave: Leave
) -> None:
    up = await deploy(SLOW, api=NO_GRACE)
    async with sent(up, stream=True, messages=[{"role": "user", "content": "A"}], max_tokens=100) as a:
        await a.tokens(1)
        b = await send(up, stream=True, messages=[{"role": "user", "content": "B"}])
        await eventually(lambda: up.state().tail.readers == 2)
        async with sent(up, stream=True, messages=[{"role": "user", "content": "C"}], max_tokens=1) as c:
            await eventually(lambda: up.state().tail.readers == 3)
            assert await depth(up) == 2
            leave(b)

            async def is_one_less() -> bool:  # asked of the broker: a gauge may be a second old
                return sum((await up.broker.stats("scripted")).waiting.values()) == 1

            await eventually(is_one_less, 1.0)
            await a.until(b"[DONE]")
            await c.until(b"[DONE]")
    assert [_asked(told.job.prompt) for told in up.recorded.told] == ["A", "C"]
    left = {bytes(name).decode() for name in redis_client.scan_iter(match="hr:{0000}:queue:*")}
    assert left == set()
    assert redis_client.zcard(keys.key("leases", 0)) == 0


def _asked(prompt: object) -> str:
    assert isinstance(prompt, messages.Chat)
    return prompt.messages[-1].content


# -- D4 ---------------------------------------------------------------------------------------------------------------


@LEAVINGS
async def test_d4_a_client_that_waits_for_a_whole_response_may_leave(
    deploy: Deploy, redis_client: redis.Redis, leave: Leave
) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 10.0})
    client = await send(up, stream=False, max_tokens=300)
    clock = Clock()
    await eventually(lambda: clock.now > 0.5)
    leave(client)
    await is_cancelled_within(up, 1.0)
    assert (await only_end(up, await some_job(up, redis_client))).status == "cancelled"


async def test_d4_a_client_that_leaves_at_once_leaves_nothing_running(deploy: Deploy) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 10.0})
    for leave in (RawClient.close, RawClient.reset, RawClient.half_close):
        client = await send(up, stream=False, max_tokens=300)
        leave(client)
        await eventually(up.is_idle, 1.5)
        client.close()


async def test_d4_nothing_stands_between_a_request_and_its_client(deploy: Deploy) -> None:
    up = await deploy()
    assert up.pods[0].config.app.app.user_middleware == []  # type: ignore[union-attr]


# -- D6 ---------------------------------------------------------------------------------------------------------------

STALLED = 50
TOKEN = "x" * 1000
KEPT = 256


async def deploy_for_stalling(deploy: Deploy, tokens: int, **api: Any) -> Deployment:
    """Its sockets send little ahead, so that a client that takes nothing is felt soon."""
    script = {"slots": 64, "tokens_per_s": 250.0, "script": [TOKEN] * tokens}
    up = await deploy(script, api={"grace_s": 60.0, **api})
    up.pods[0]._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    return up


def readers(up: Deployment) -> list[Reader]:
    return [reader for group in up.state().tail._readers.values() for reader in group]


async def test_d6_fifty_clients_that_take_nothing_cost_little_and_end_at_once(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy_for_stalling(deploy, 700)
    await up.post(messages=HI, max_tokens=1)
    tasks, connections = len(asyncio.all_tasks()), len(redis_client.client_list())
    clients = [await send(up, stream=True, receive_bytes=TAKES_LITTLE) for _ in range(STALLED)]
    for client in clients:
        await client.until(TOKEN.encode())
    await eventually(up.is_idle, 30.0)  # nobody waits for them: all answers are in their logs
    stalled = readers(up)
    assert len(stalled) == STALLED
    assert all(stream.is_writing for stream in up.state().beats)
    assert max(reader.kept for reader in stalled) <= KEPT
    for client in clients:
        client.close()
    await eventually(lambda: up.state().tail.readers == 0 and not up.pods[0].server_state.tasks)
    await eventually(lambda: len(asyncio.all_tasks()) <= tasks)
    await eventually(lambda: len(redis_client.client_list()) <= connections + up.settings.redis.pool_size)
    await eventually(lambda: not up.pods[0].server_state.connections)


async def test_d6_a_client_that_stalls_and_goes_on_gets_all(deploy: Deploy) -> None:
    up = await deploy_for_stalling(deploy, 700)
    async with sent(up, stream=True, receive_bytes=TAKES_LITTLE) as client:
        await client.until(TOKEN.encode())
        await eventually(up.is_idle, 10.0)
        assert [reader.kept <= KEPT for reader in readers(up)] == [True]
        body = await client.until(b"data: [DONE]\n\n")
        assert body.count(TOKEN.encode()) == 700


async def test_d6_a_client_that_takes_nothing_for_too_long_is_cut_off(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    up = await deploy_for_stalling(deploy, 400, slow_client_timeout_s=0.5, heartbeat_s=2.0)
    async with sent(up, stream=True, receive_bytes=TAKES_LITTLE) as client:
        await client.until(TOKEN.encode())
        await eventually(lambda: any(stream.is_writing for stream in up.state().beats))
        clock = Clock()
        await eventually(lambda: not up.state().beats, 5.0)
        assert clock.now > 0.4
        await eventually(lambda: not up.pods[0].server_state.connections, 3.0)
        assert b"[DONE]" not in await client.rest()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    await eventually(up.is_idle)
    assert await up.state_of(client.job) == "done"  # its job went on for the grace time
