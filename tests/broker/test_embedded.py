"""The embedded server: what it held is there after a restart, and those who talk to it find it again."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis.asyncio as redis

from headrace.broker import embedded
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Append, Hint
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import (
    STEP,
    Ears,
    admit,
    an_end,
    append,
    claim,
    finish,
    ids_of,
    last_id,
    serve,
    state_of,
    tick,
    unknown_id,
)
from tests.support import eventually
from tests.users import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """A server of the test's own, which it may kill."""
    with tempfile.TemporaryDirectory(prefix="hr-") as data_dir:
        server = Server(data_dir)
        await server.start()
        yield server
        await server.stop()


@pytest.fixture
async def broker(server: Server) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(server.url, RedisSettings(), QueueSettings())
    await broker.open()
    await serve(broker)
    yield broker
    await broker.close()


async def kill(server: Server) -> None:
    """SIGKILL, once the log file has everything: the server holds a write back while an fsync is under way."""
    async with redis.Redis.from_url(server.root_url, protocol=2) as client:

        async def is_written() -> bool:
            return bool((await client.info("persistence"))["aof_buffer_length"] == 0)

        await eventually(is_written)
    assert server.process is not None
    server.process.kill()
    await server.process.wait()


async def test_a_killed_server_has_all_jobs_and_logs_of_its_file_when_it_is_started_again(
    server: Server, broker: RedisBroker
) -> None:
    ended, running = await finish(broker), await admit(broker)
    await claim(broker)
    await append(broker, running, "1-1")
    waiting = await admit(broker)
    await kill(server)
    await server.start()
    assert [await state_of(broker, job_id) for job_id in (ended, running, waiting)] == ["done", "running", "waiting"]
    assert await ids_of(broker, running) == ["0-1", "1-0", "1-1"]
    assert (await tick(broker, list_held=True)).jobs == [running]
    assert await append(broker, running, "1-2") == "ok"


async def test_a_listener_finds_a_restarted_server_and_tells_of_the_gap(server: Server, broker: RedisBroker) -> None:
    ears = Ears()
    pod = await ears.pod(broker, "p")
    await kill(server)
    await server.start()
    await eventually(lambda: pod.gaps == 2)
    lane = broker.lane(0)
    entry = Append(unknown_id(), "1-1", STEP)
    assert (await lane.exchange([Hint("p", [entry])], [], [])).deaf == []
    await eventually(lambda: pod.heard == [entry])
    await lane.close()
    await ears.listeners[0].close()


async def test_a_lane_settles_on_a_restarted_server(server: Server, broker: RedisBroker) -> None:
    first, second = await admit(broker), await admit(broker)
    lane = broker.lane(0)
    await broker.claim(0, "r", "m", 2)
    await lane.exchange([], [], [an_end(first)])
    await kill(server)
    await server.start()

    async def is_settled() -> bool:
        try:
            return (await lane.exchange([], [], [an_end(second)])).settles == ["ok"]
        except BrokerDown:
            return False

    await eventually(is_settled)
    assert await state_of(broker, second) == "done"
    await lane.close()


async def test_a_break_fails_the_exchange_and_not_the_lane(server: Server, broker: RedisBroker) -> None:
    job_id = await admit(broker)
    await claim(broker)
    lane = broker.lane(0)
    assert (await lane.exchange([], [Append(job_id, "1-1", STEP)], [])).appends == ["ok"]
    await kill(server)
    with pytest.raises(BrokerDown):
        await lane.exchange([], [Append(job_id, "1-2", STEP)], [])
    with pytest.raises(BrokerDown):
        await last_id(broker, job_id)
    await server.start()
    assert await last_id(broker, job_id) == "1-1"
    assert (await lane.exchange([], [Append(job_id, "1-2", STEP)], [])).appends == ["ok"]
    await lane.close()


async def test_a_second_server_on_the_same_folder_is_refused(server: Server) -> None:
    second = EmbeddedServer(server.data_dir)
    with pytest.raises(BrokerDown, match="another headrace runs on"):
        await second.start()


async def test_a_server_that_cannot_start_points_to_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "server_binary", lambda: "/bin/false")
    with pytest.raises(BrokerDown, match=r"ended with 1; see .*server\.log"):
        await EmbeddedServer(str(tmp_path)).start()


async def test_stop_leaves_no_socket_and_may_be_repeated(server: Server) -> None:
    await server.stop()
    await server.stop()
    assert not server.socket.exists()


def test_the_socket_of_a_deep_folder_is_short_enough() -> None:
    deep = "/tmp/" + "d" * 200
    assert len(str(embedded.socket_path(deep))) < 100
    assert embedded.socket_path(deep) != embedded.socket_path(deep + "e")
