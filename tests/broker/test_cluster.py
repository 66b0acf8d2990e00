"""Redis Cluster: the shards are spread over three servers, and move between them while streams go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from headrace.broker import keys
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import ConfigError
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings, Settings
from headrace.workers import engines
from headrace.workers.engines.scripted import oracle
from headrace.workers.worker import Worker
from tests.broker.redis_cluster import Cluster, redis_cluster
from tests.serving import Pod, scripted_settings
from tests.support import eventually

SHARDS = 12
TOKENS = 40


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with redis_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


def broker_of(cluster: Cluster, settings: Settings) -> RedisBroker:
    return RedisBroker(cluster.url, settings.redis, settings.queue)


@contextlib.asynccontextmanager
async def deployment(cluster: Cluster, redis_server: EmbeddedServer, rate: float) -> AsyncIterator[list[Pod]]:
    """Two pods and a replica on the cluster."""
    settings = scripted_settings(redis_server, tokens_per_s=rate)
    settings = msgspec.structs.replace(settings, redis=RedisSettings(shards=SHARDS, cluster=True))
    broker = broker_of(cluster, settings)
    await broker.open()
    worker = Worker(settings, settings.models[0], broker, engines.make(settings.models[0], settings.data_dir))
    await worker.start()
    running = asyncio.create_task(worker.run())
    pods = [Pod(settings, broker_of(cluster, settings)) for _ in range(2)]
    try:
        await eventually(lambda: all(pod.started for pod in pods), 20)
        yield pods
    finally:
        await asyncio.gather(*(pod.stop() for pod in pods))
        await worker.drain()
        await running
        await broker.close()


async def read(http: httpx.AsyncClient, text: str, jobs: dict[str, str]) -> str:
    """A whole stream's text; `jobs` gets its job."""
    body: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": text}], "stream": True}
    said = ""
    async with http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": TOKENS}) as response:
        assert response.status_code == 200, await response.aread()
        jobs[text] = response.headers["x-request-id"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                if event["choices"]:
                    said += event["choices"][0]["delta"].get("content") or ""
    return said


def expected(text: str) -> str:
    return "".join(f" {oracle(text, 0, 0, index):08x}" for index in range(TOKENS))


def test_the_shards_are_spread_over_all_servers(cluster: Cluster) -> None:
    held = [cluster.shards_at(number, SHARDS) for number in range(3)]
    assert all(held)
    assert sorted(shard for each in held for shard in each) == list(range(SHARDS))


async def test_streams_of_every_shard_are_whole_on_every_pod(cluster: Cluster, redis_server: EmbeddedServer) -> None:
    jobs: dict[str, str] = {}
    async with deployment(cluster, redis_server, 0) as [one, two], httpx.AsyncClient(base_url=one.url) as http:
        for _ in range(40):
            texts = [f"{len(jobs)} {number}" for number in range(8)]
            for text, said in zip(
                texts, await asyncio.gather(*(read(http, text, jobs) for text in texts)), strict=True
            ):
                assert said == expected(text)
            if {keys.shard_of(job) for job in jobs.values()} == set(range(SHARDS)):
                break
        assert {keys.shard_of(job) for job in jobs.values()} == set(range(SHARDS))
        async with httpx.AsyncClient(base_url=two.url) as other:  # each is read again at the other pod
            for job in list(jobs.values())[:16]:
                again = await other.get(f"/v1/streams/{job}")
                assert again.text.endswith("data: [DONE]\n\n")
            assert (await other.get("/metrics")).status_code == 200
            assert (await other.get("/readyz")).status_code == 200
    for number in range(3):
        assert cluster.ask(number, "DBSIZE") > 0


async def moved_streams(cluster: Cluster, redis_server: EmbeddedServer, move: Any) -> None:
    """Streams of all shards, in the midst of which something moves, are whole."""
    jobs: dict[str, str] = {}
    async with (
        deployment(cluster, redis_server, 10) as [one, two],
        httpx.AsyncClient(base_url=one.url, timeout=60) as http,
        httpx.AsyncClient(base_url=two.url, timeout=60) as other,
    ):
        texts = [f"move {number}" for number in range(36)]
        streams = [
            asyncio.create_task(read(http if number % 2 else other, text, jobs)) for number, text in enumerate(texts)
        ]
        await eventually(lambda: len(jobs) == len(texts), 20)
        await asyncio.to_thread(move)
        said = await asyncio.gather(*streams)
        assert said == [expected(text) for text in texts]
        jobs.clear()
        assert await read(http, "after", jobs) == expected("after")


async def test_streams_go_on_while_their_shards_move_to_another_server(
    cluster: Cluster, redis_server: EmbeddedServer
) -> None:
    before = cluster.shards_at(1, SHARDS)
    first, last = 16384 // 3, 2 * 16384 // 3 - 1

    def move() -> None:
        cluster.ask(1, "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", first, last, "NODE", cluster.id_of(2))

    await moved_streams(cluster, redis_server, move)
    assert before
    assert set(cluster.shards_at(2, SHARDS)) >= set(before)
    assert cluster.shards_at(1, SHARDS) == []


async def test_streams_go_on_when_a_replica_takes_over(cluster: Cluster, redis_server: EmbeddedServer) -> None:
    held = cluster.shards_at(0, SHARDS)
    await moved_streams(cluster, redis_server, lambda: cluster.ask(3, "CLUSTER", "FAILOVER"))
    assert held
    assert cluster.shards_at(3, SHARDS) == held


async def test_a_wrong_setting_says_so(cluster: Cluster, redis_server: EmbeddedServer) -> None:
    for url, is_cluster in ((cluster.url, False), (redis_server.url, True)):
        broker = RedisBroker(url, RedisSettings(cluster=is_cluster), QueueSettings())
        with pytest.raises(ConfigError, match=r"redis\.cluster"):
            await broker.open()
        await broker.close()
