"""Redis in trouble, one kind at a time: pods and a worker stay up, streams go on whole or end with a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import redis.asyncio as redis

from bench.chaos_stream import Reading, Refused, ask
from bench.proxy import Proxy
from headrace.broker.embedded import EmbeddedServer, as_user, socket_path
from headrace.broker.models import ScriptedModel
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import ApiSettings, QueueSettings, RedisSettings, Settings, WorkerSettings
from headrace.client import sse
from headrace.workers import engines
from headrace.workers.engines.scripted import oracle
from headrace.workers.worker import Worker
from tests.serving import Pod
from tests.support import eventually
from tests.system.conftest import MakeMachine, scripted, until
from tests.users import SECRET, Server

LEASE_S = 1.0
PATIENCE_S = 6.0
RATE = 40.0
MAX_LINES = 20
"""Warnings and errors that a test's trouble may cause, however long it lasts."""


def text_of(name: str, tokens: int) -> str:
    return "".join(f" {oracle(name, 0, 0, index):08x}" for index in range(tokens))


class Client:
    """One stream on one connection; `reading` is what has come so far."""

    def __init__(self, pod: Pod, name: str, tokens: int) -> None:
        self.port = int(pod.url.rpartition(":")[2])
        self.expected = text_of(name, tokens)
        self.reading = Reading()
        self._body = json.dumps(
            {
                "model": "scripted",
                "messages": [{"role": "user", "content": name}],
                "max_tokens": tokens,
                "stream": True,
            }
        ).encode()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        parser = sse.Parser()
        try:
            async with ask(self.port, "POST", "/v1/chat/completions", {}, self._body) as answer:
                async for piece in answer.pieces():
                    for event in parser.feed(piece):
                        self.reading.take(event)
        except Refused as refused:  # it ended before its headers
            self.reading.error, self.reading.is_done = refused.code, True

    async def begun(self, tokens: int = 5) -> None:
        await eventually(lambda: len(self.reading.text) >= 9 * tokens)

    async def end(self, within_s: float = 20.0) -> Reading:
        await asyncio.wait_for(self._task, within_s)
        assert self.reading.violations == []
        assert self.reading.is_done
        assert self.expected.startswith(self.reading.text)
        return self.reading

    async def is_whole(self) -> None:
        reading = await self.end()
        assert (reading.error, reading.text) == (None, self.expected)


class Deployment:
    """A Valkey of its own behind a proxy, one pod and one worker in this process."""

    def __init__(self, folder: Path, slots: int) -> None:
        self.folder = folder
        self.is_stopped = False
        self.valkey = Server(str(folder))
        self.proxy = Proxy(folder / "proxy.sock", socket_path(str(folder)))
        self.settings = Settings(
            [ScriptedModel(name="scripted", slots=slots, tokens_per_s=RATE)],
            redis=RedisSettings(url=self.proxy.url, timeout_s=1.0),
            queue=QueueSettings(lease_s=LEASE_S, reader_lease_s=1.5),
            api=ApiSettings(drain_s=1.0, heartbeat_s=2.0, broker_patience_s=PATIENCE_S),
            worker=WorkerSettings(drain_s=0.1),
            data_dir=str(folder),
        )

    def broker(self, user: str) -> RedisBroker:
        url = as_user(self.proxy.url, str(self.folder), user)
        return RedisBroker(url, self.settings.redis, self.settings.queue)

    def stream(self, name: str, tokens: int) -> Client:
        return Client(self.pod, name, tokens)

    @contextlib.asynccontextmanager
    async def admin(self) -> AsyncIterator[redis.Redis]:
        """A client past the proxy."""
        async with redis.Redis.from_url(self.valkey.root_url, protocol=2) as client:
            yield client

    async def post(self) -> httpx.Response:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "new"}], "max_tokens": 5}
        async with httpx.AsyncClient(timeout=20) as client:
            return await client.post(f"{self.pod.url}/v1/chat/completions", json=body)

    async def is_in_trouble(self) -> bool:
        async with httpx.AsyncClient() as client:
            return (await client.get(f"{self.pod.url}/readyz")).status_code == 503

    async def serves_again(self, within_s: float = 5.0) -> None:
        """A new request is answered, without any restart."""
        deadline = time.monotonic() + within_s
        while (answer := await self.post()).status_code != 200:
            assert time.monotonic() < deadline, answer.text
            await asyncio.sleep(0.1)
        assert answer.json()["choices"][0]["message"]["content"] == text_of("new", 5)

    async def start(self) -> None:
        await self.valkey.start()
        await self.proxy.start()
        self._broker = self.broker("worker")
        await self._broker.open()
        model = self.settings.models[0]
        self._worker = Worker(self.settings, model, self._broker, engines.make(model, str(self.folder)))
        await self._worker.start()
        self._running = asyncio.create_task(self._worker.run())
        self.pod = Pod(self.settings, self.broker("gateway"))
        await eventually(lambda: self.pod.started)

    async def stop(self) -> None:
        if self.is_stopped:
            return
        self.is_stopped = True
        await self.pod.stop()
        await self._worker.drain()
        await self._running
        await self._broker.close()
        await self.proxy.close()
        await self.valkey.stop()


@contextlib.asynccontextmanager
async def deployed(slots: int = 64) -> AsyncIterator[Deployment]:
    folder = Path(tempfile.mkdtemp(prefix="hr-"))
    deployment = Deployment(folder, slots)
    await deployment.start()
    try:
        yield deployment
    finally:
        await deployment.stop()
        shutil.rmtree(folder)


@pytest.fixture
async def up() -> AsyncIterator[Deployment]:
    async with deployed() as deployment:
        yield deployment


@pytest.fixture(autouse=True)
async def log_stays_short(caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    yield
    lines = [record for record in caplog.get_records("call") if record.levelno >= logging.WARNING]
    assert len(lines) <= MAX_LINES, "\n".join(record.getMessage() for record in lines)


async def cpu_share(seconds: float = 1.5) -> float:
    """How much of a processor this process, with everything in it, uses now."""
    began, used = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


async def test_e8_connections_cut_for_three_seconds_leave_a_stream_whole(up: Deployment) -> None:
    client = up.stream("cut", 60)
    await client.begun()
    await up.proxy.cut_for(3.0)
    await client.is_whole()
    await up.serves_again()


async def test_e8_a_server_that_takes_no_writes_is_waited_for(up: Deployment) -> None:
    client = up.stream("readonly", 60)
    await client.begun()
    async with up.admin() as admin:
        await admin.replicaof("127.0.0.1", "1")
        await eventually(up.is_in_trouble)
        refused = await up.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_down")
        assert refused.headers["retry-after"] == "1"
        await admin.replicaof("NO", "ONE")
    await client.is_whole()
    await up.serves_again()


async def test_e8_a_full_server_refuses_new_requests_and_running_ones_end(up: Deployment) -> None:
    client = up.stream("oom", 2000)
    await client.begun()
    async with up.admin() as admin:
        await admin.config_set("maxmemory", "1")
        refused = await up.post()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_full")
        assert int(refused.headers["retry-after"]) > 0
        assert (await client.end()).error == "broker_full"
        await admin.config_set("maxmemory", "0")
    await up.serves_again()


async def test_a_server_that_is_full_for_a_moment_leaves_a_stream_whole(up: Deployment) -> None:
    client = up.stream("moment", 60)
    await client.begun()
    async with up.admin() as admin:
        await admin.config_set("maxmemory", "1")
        await asyncio.sleep(1.0)
        await admin.config_set("maxmemory", "0")
    await client.is_whole()


async def test_a_server_that_loads_its_data_is_waited_for(up: Deployment) -> None:
    client = up.stream("loading", 60)
    await client.begun()
    up.proxy.answer = b"-LOADING the dataset is being loaded"
    up.proxy.cut()
    await eventually(up.is_in_trouble)
    assert (await up.post()).status_code == 503
    up.proxy.answer = None
    up.proxy.cut()
    await client.is_whole()


async def test_a_killed_server_that_has_its_log_leaves_a_stream_whole(up: Deployment) -> None:
    client = up.stream("killed", 80)
    await client.begun()
    assert up.valkey.process is not None
    up.valkey.process.kill()
    await up.valkey.process.wait()
    await up.valkey.start()
    await client.is_whole()
    await up.serves_again()


async def test_e4_a_server_emptied_while_idle_serves_on(up: Deployment) -> None:
    await up.serves_again()
    async with up.admin() as admin:
        await admin.flushall()
    await up.serves_again()
    assert await cpu_share() < 0.5


async def test_e4_jobs_that_a_server_has_forgotten_end_with_an_error() -> None:
    async with deployed(slots=1) as up:
        streaming = up.stream("streaming", 2000)
        await streaming.begun()
        queued = up.stream("queued", 10)
        await asyncio.sleep(0.3)
        async with up.admin() as admin:
            await admin.flushall()
        for client in (streaming, queued):
            assert (await client.end(LEASE_S + 2.0)).error == "log_lost"
        await up.serves_again()
        assert await cpu_share() < 0.5


async def test_e4_a_server_that_was_started_again_without_its_data_serves_on(up: Deployment) -> None:
    client = up.stream("empty", 2000)
    await client.begun()
    await up.valkey.stop()
    shutil.rmtree(up.folder / "broker" / "appendonlydir")  # its passwords are not data
    await up.valkey.start()
    assert (await client.end(LEASE_S + 4.0)).error == "log_lost"
    await up.serves_again()


async def test_e8_a_server_that_stays_away_ends_streams_and_is_taken_back(up: Deployment) -> None:
    client = up.stream("away", 2000)
    await client.begun()
    up.proxy.is_refusing = True
    up.proxy.cut()
    assert await cpu_share() < 0.5
    assert (await client.end(PATIENCE_S + 4.0)).error == "broker_down"
    assert (await up.post()).status_code == 503
    up.proxy.is_refusing = False
    await up.serves_again()


async def test_a_slow_server_makes_no_text_wrong(up: Deployment) -> None:
    up.proxy.delay_s = 0.05
    clients = [up.stream(f"slow {number}", 40) for number in range(5)]
    for client in clients:
        await client.is_whole()


async def test_a_host_that_vanishes_is_noticed(up: Deployment) -> None:
    client = up.stream("vanished", 100)
    await client.begun()
    up.proxy.silence()
    await client.is_whole()
    await up.serves_again()


async def test_e8_a_promoted_replica_that_lags_shows_no_wrong_text(up: Deployment) -> None:
    """Its worker writes again what is missing of the one; of the other nothing is left."""
    folder = up.folder / "replica" / "broker"
    folder.mkdir(parents=True)
    shutil.copy(up.folder / "broker" / "passwords.json", folder)  # pods and workers must be known there too
    replica = Server(str(folder.parent))
    await replica.start()
    try:
        kept = up.stream("kept", 120)
        await kept.begun()
        async with up.admin() as admin, redis.Redis.from_url(replica.root_url, protocol=2) as other:
            await admin.config_set("repl-diskless-sync-delay", "0")
            await admin.config_set("port", str(port := _free_port()))
            await other.config_set("masteruser", "root", "masterauth", SECRET)
            await other.replicaof("127.0.0.1", str(port))
            await eventually(lambda: _is_synced(other))
            await other.replicaof("NO", "ONE")
        lost = up.stream("lost", 2000)
        await lost.begun()
        up.proxy.target = socket_path(str(up.folder / "replica"))
        up.proxy.cut()
        await kept.is_whole()
        assert (await lost.end()).error == "log_lost"
        await up.serves_again()
        await up.stop()
    finally:
        await replica.stop()


async def _is_synced(replica: redis.Redis) -> bool:
    info = await replica.info("replication")
    return bool(info["master_link_status"] == "up")


def _free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_e8_pods_and_workers_that_start_before_their_broker_wait_for_it(make_machine: MakeMachine) -> None:
    machine = make_machine({"models": [scripted()]})
    pod, worker = machine.start("api"), machine.start("worker")
    until(lambda: _status(machine.urls[0], "/healthz") == 200, 20)
    assert _status(machine.urls[0], "/readyz") == 503
    time.sleep(3)
    assert (pod.poll(), worker.poll()) == (None, None), machine.said()
    assert machine.said().count("WARNING") <= 6, machine.said()
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder))
        runner.run(server.start())
        until(lambda: _status(machine.urls[0], "/readyz") == 200, 10)
        body = {"model": "scripted", "messages": [{"role": "user", "content": "late"}], "max_tokens": 5}
        until(lambda: httpx.post(f"{machine.urls[0]}/v1/chat/completions", json=body).status_code == 200, 10)
        for process in (pod, worker):
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it was sent
        runner.run(server.stop())


def _status(url: str, path: str) -> int:
    try:
        return httpx.get(url + path, timeout=2).status_code
    except httpx.HTTPError:
        return 0
