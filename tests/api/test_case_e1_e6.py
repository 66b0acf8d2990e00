"""Cases E1, E5 and E6: an end that is not heard of, what a thousand requests leave behind, and readers by hundreds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis

from headrace.broker.models import ScriptedModel
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import ApiSettings, QueueSettings, RedisSettings, Settings, WorkerSettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, RecordingEngine
from tests.api.sockets import Clock, sent
from tests.serving import Pod
from tests.support import eventually
from tests.users import Server
from tests.workers.replicas import oracle_text

HI = [{"role": "user", "content": "hi"}]

# -- E1 ---------------------------------------------------------------------------------------------------------------


async def add_named_pod(up: Deployment, server: Server, redis_client: redis.Redis) -> None:
    """A pod that the server knows by the user `pod`, so that its connections can be told from the worker's."""
    redis_client.execute_command("ACL", "SETUSER", "pod", "on", ">secret", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]
    broker = RedisBroker(server.url_of("pod"), up.settings.redis, up.settings.queue)
    up.pods.append(pod := Pod(up.settings, broker))
    await eventually(lambda: pod.started)


def cut(redis_client: redis.Redis, *, is_let_back: bool) -> None:
    """Cut all connections of the pod."""
    redis_client.execute_command("ACL", "SETUSER", "pod", "on" if is_let_back else "off")  # type: ignore[no-untyped-call]
    redis_client.execute_command("CLIENT", "KILL", "USER", "pod")  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("away_s", [0.0, 2.0])
async def test_e1_an_end_is_told_though_the_pod_was_cut_off_when_it_came(
    deploy: Deploy, redis_server: Server, redis_client: redis.Redis, away_s: float
) -> None:
    up = await deploy({"tokens_per_s": 20.0}, pods=0)
    await add_named_pod(up, redis_server, redis_client)
    async with up.open(messages=HI, max_tokens=12) as opened:
        await opened.until(oracle_text("hi", 3)[-8:].encode())
        reading = asyncio.create_task(opened.rest())
        cut(redis_client, is_let_back=False)

        async def has_ended() -> bool:
            return await up.state_of(opened.job) == "done"

        await eventually(has_ended)
        clock = Clock()
        await eventually(lambda: clock.now >= away_s)
        assert not reading.done()
        clock = Clock()
        cut(redis_client, is_let_back=True)
        answer = await asyncio.wait_for(reading, 5.0)
        assert clock.now < 3.0
    text = "".join(event.json["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == oracle_text("hi", 12)
    assert answer.body.count(b"data: [DONE]\n\n") == 1
    redis_client.acl_deluser("pod")


async def test_e1_cuts_at_every_moment_leave_no_gap_and_no_repeat(
    deploy: Deploy, redis_server: Server, redis_client: redis.Redis
) -> None:
    up = await deploy({"tokens_per_s": 40.0}, pods=0)
    await add_named_pod(up, redis_server, redis_client)
    async with up.open(messages=HI, max_tokens=80) as opened:
        reading = asyncio.create_task(opened.rest())
        for token in itertools.count(8, 8):
            await eventually(lambda token=token: up.recorded.tokens >= min(token, 80))  # type: ignore[misc]
            if token > 80:
                break
            cut(redis_client, is_let_back=True)
        answer = await asyncio.wait_for(reading, 5.0)
    text = "".join(event.json["choices"][0]["delta"].get("content", "") for event in answer.events[:-1])
    assert text == oracle_text("hi", 80)
    redis_client.acl_deluser("pod")


# -- E5 ---------------------------------------------------------------------------------------------------------------

Kind = Callable[[Deployment], Awaitable[None]]


async def done(up: Deployment) -> None:
    answer = await up.post(messages=HI, max_tokens=3)
    assert answer.json["choices"][0]["message"]["content"] == oracle_text("hi", 3)


async def left_in_flight(up: Deployment) -> None:
    async with up.open(messages=HI, max_tokens=5000) as opened:
        await opened.until(b'"content"')


async def cancelled_in_flight(up: Deployment) -> None:
    async with up.open(messages=HI, max_tokens=5000) as opened:
        await opened.until(b'"content"')
        assert (await up.ask("DELETE", f"/v1/streams/{opened.job}")).json["cancelled"]
        assert b'"code":"cancelled"' in (await opened.rest()).body


async def left_in_the_queue(up: Deployment) -> None:
    async with up.open(messages=HI, max_tokens=5000):
        pass


async def cancelled_in_the_queue(up: Deployment) -> None:
    async with up.open(messages=HI, max_tokens=5000) as opened:
        answer = await up.ask("DELETE", f"/v1/streams/{opened.job}")
        assert answer.json["was"] == "waiting"


async def invalid(up: Deployment) -> None:
    assert (await up.post(messages=HI, max_tokens=-1)).status == 400


async def many(up: Deployment, *kinds: Kind, count: int, at_once: int = 16) -> None:
    """`count` requests of each kind, some at a time."""
    left = itertools.chain.from_iterable(itertools.repeat(kind, count) for kind in kinds)

    async def work() -> None:
        for kind in left:
            await kind(up)

    await asyncio.gather(*(work() for _ in range(at_once)))


def keys_of(redis_client: redis.Redis) -> list[str]:
    return [bytes(name).decode() for name in redis_client.scan_iter(count=1000)]


def undying(redis_client: redis.Redis) -> list[str]:
    """Keys without an expiry; one that is gone since the scan says -2."""
    names = keys_of(redis_client)
    pipe = redis_client.pipeline(transaction=False)
    for name in names:
        pipe.pttl(name)
    return [name for name, ttl in zip(names, pipe.execute(), strict=True) if ttl == -1]


@contextlib.asynccontextmanager
async def looking(redis_client: redis.Redis) -> AsyncIterator[list[str]]:
    """Look again and again for a key that would never expire, while the block runs."""
    found: list[str] = []
    looks = 0

    async def look() -> None:
        nonlocal looks
        while True:
            found.extend(await asyncio.to_thread(undying, redis_client))
            looks += 1

    task = asyncio.create_task(look())
    yield found
    await eventually(lambda: looks >= 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def gauges(answer: Answer) -> dict[str, float]:
    """Everything that says how much there is now, by name and labels."""
    names = ("headrace_queue_depth", "headrace_queue_oldest_seconds", "headrace_running_jobs", "headrace_streams_open")
    lines = [line.rpartition(" ") for line in answer.body.decode().splitlines() if line.startswith(names)]
    assert {name.partition("{")[0] for name, _, _ in lines} == set(names)
    return {name: float(value) for name, _, value in lines}


async def test_e5_a_thousand_requests_leave_nothing(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(
        {"slots": 16, "tokens_per_s": 200.0},
        {"log_ttl_s": 1.0, "reader_lease_s": 3.0},
        {"grace_s": 0.0, "headers_after_ms": 0},
    )

    async def is_queue_empty() -> bool:
        return not sum((await up.broker.stats("scripted")).waiting.values())

    async with looking(redis_client) as undying_keys:
        async with contextlib.AsyncExitStack() as busy:
            for _ in range(16):
                await busy.enter_async_context(up.open(messages=HI, max_tokens=100_000))
            await eventually(lambda: up.workers[0].running == 16)
            await many(up, left_in_the_queue, cancelled_in_the_queue, count=100)
            await eventually(is_queue_empty)
            assert len(up.recorded.told) == 16
        await eventually(lambda: up.workers[0].running == 0)
        await many(up, left_in_flight, cancelled_in_flight, count=100)
        await many(up, done, count=400)
        await many(up, invalid, count=184)
        await eventually(up.is_idle)
    assert undying_keys == []
    found = gauges(await up.ask("GET", "/metrics"))
    assert {name: value for name, value in found.items() if value} == {}
    assert len(up.recorded.told) == 16 + 200 + 400  # no request that left the queue was ever begun

    def of_requests() -> list[str]:
        return [name for name in keys_of(redis_client) if name.split(":")[2] in ("job", "log", "readers")]

    await eventually(lambda: of_requests() == [], 4.0)
    lists = [name for name in keys_of(redis_client) if name.split(":")[2] in ("queue", "leases", "unread", "deadlines")]
    assert lists == []


# -- E6 ---------------------------------------------------------------------------------------------------------------

VIEWERS = 200
POOL = 4


@pytest.fixture
async def small(redis_server: Server, redis_client: redis.Redis) -> AsyncIterator[Deployment]:
    """Two pods with few connections each, and an engine that says nothing to a long prompt."""
    model = ScriptedModel(name="scripted", slots=3 * VIEWERS, tokens_per_s=0.0, prefill_tokens_per_s=20.0)
    settings = Settings(
        [model],
        redis=RedisSettings(pool_size=POOL),
        queue=QueueSettings(),
        api=ApiSettings(drain_s=1.0, grace_s=0.0, headers_after_ms=0),
        worker=WorkerSettings(drain_s=0.1),
    )
    up = Deployment(settings, redis_server)
    await up.start(2, 1, RecordingEngine)
    yield up
    await up.stop()


@pytest.mark.parametrize("pods", [1, 2])
async def test_e6_hundreds_of_silent_streams_keep_nothing_waiting(
    small: Deployment, redis_client: redis.Redis, pods: int
) -> None:
    long = [{"role": "user", "content": "x" * 40_000}]
    before = len(redis_client.client_list())
    async with contextlib.AsyncExitStack() as viewing:
        for pod in range(pods):
            opening = (sent(small, stream=True, messages=long, max_tokens=1, pod=pod) for _ in range(VIEWERS))
            for client in await asyncio.gather(*map(viewing.enter_async_context, opening)):
                await client.until(b"\r\n\r\n")
        await eventually(lambda: small.workers[0].running == VIEWERS * pods)
        clock = Clock()
        async with small.open(messages=HI, max_tokens=1) as opened:
            assert clock.now < 0.5
            assert (await opened.rest()).body.count(b"[DONE]") == 1
        async with small.open(messages=long) as opened:
            clock = Clock()
            assert (await small.ask("DELETE", f"/v1/streams/{opened.job}")).json["cancelled"]
            assert clock.now < 0.5
            assert b'"code":"cancelled"' in (await opened.rest()).body
            assert clock.now < 1.0
        for path in ("/healthz", "/readyz", "/metrics"):
            clock = Clock()
            assert (await small.ask("GET", path)).status == 200
            assert clock.now < 0.5
        # of each pod and of the worker: the pool; and what it holds open, one subscription or lane each
        assert len(redis_client.client_list()) <= before + 3 * (POOL + 2)
    await eventually(lambda: all(small.state(pod).tail.readers == 0 for pod in range(pods)))
    await eventually(small.is_idle)


async def test_e6_a_subscription_that_hears_nothing_for_longer_than_a_timeout_stays(
    redis_server: Server, redis_client: redis.Redis
) -> None:
    broker = RedisBroker(redis_server.url, RedisSettings(timeout_s=0.2), QueueSettings())
    gaps: list[None] = []
    listener = broker.listen_hints("pod", lambda _: None, lambda: gaps.append(None))
    await eventually(lambda: len(gaps) == 1)
    clock = Clock()
    await eventually(lambda: clock.now > 1.0)
    assert len(gaps) == 1
    await listener.close()
    await broker.close()
