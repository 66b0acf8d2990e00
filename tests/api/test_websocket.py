"""`/ws/chat`: what is said over it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from headrace.broker.settings import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually
from tests.workers.replicas import oracle_text

SLOW = {"tokens_per_s": 20.0}
KEYS = [KeySettings("alice", hashlib.sha256(b"sk-alice").hexdigest())]


class Talk:
    """One connection, and what has come over it."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.said: list[dict[str, Any]] = []

    async def say(self, **message: Any) -> None:
        await self.connection.send(json.dumps(message))

    async def next(self) -> dict[str, Any]:
        self.said.append(json.loads(await self.connection.recv(decode=True)))
        return self.said[-1]

    async def tokens(self, count: int) -> None:
        while sum(bool(each.get("token")) for each in self.said) < count:
            await self.next()

    async def end(self) -> int:
        """Read to the end; the close code."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        code = self.connection.close_code
        assert code is not None
        return code

    @property
    def text(self) -> str:
        return "".join(each.get("token", "") for each in self.said)


@contextlib.asynccontextmanager
async def talk(up: Deployment, pod: int = 0, /, path: str = "/ws/chat", **options: Any) -> AsyncIterator[Talk]:
    url = up.pods[pod].url.replace("http:", "ws:") + path
    async with connect(url, proxy=None, compression=None, **options) as connection:
        yield Talk(connection)


def jobs(redis_client: redis.Redis) -> int:
    return len(list(redis_client.scan_iter(match="hr:{0000}:job:*")))


async def test_a_whole_talk(deploy: Deploy) -> None:
    up = await deploy()
    for ask in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}], "model": "scripted"}):
        async with talk(up) as ws:
            await ws.say(max_tokens=3, **ask)
            assert await ws.end() == 1000
        *objects, last = ws.said
        assert ws.text == oracle_text("hi", 3) and not any(each["done"] for each in objects)
        assert (last["done"], last["finish_reason"], last["usage"]["completion_tokens"]) == (True, "length", 3)
        assert all(each["id"].count(".") == 1 for each in ws.said)


async def test_resume_on_another_pod_at_any_object(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy({"tokens_per_s": 200.0}, pods=2)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=5)
        await ws.end()
    for n, each in enumerate(ws.said):
        async with talk(up, 1) as again:
            await again.say(resume=each["id"])
            assert await again.end() == 1000
        assert again.said == ws.said[n + 1 :]
    assert jobs(redis_client) == 1


async def test_resume_stands_alone(deploy: Deploy) -> None:
    up = await deploy()
    async with talk(up) as ws:
        await ws.say(resume="0" * 32 + ".1-1", prompt="hi")
        assert await ws.end() == 1008
    assert ws.said[0]["error"]["param"] == "resume"


async def test_stop_cancels(deploy: Deploy) -> None:
    up = await deploy(SLOW)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=10_000)
        await ws.tokens(2)
        await ws.say(stop=True)
        assert await ws.end() == 1000
    assert (ws.said[-1]["error"]["code"], ws.said[-1]["done"]) == ("cancelled", True)
    await eventually(up.is_idle)


async def test_ping_is_answered_in_the_stream(deploy: Deploy) -> None:
    up = await deploy(SLOW)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=10)
        await ws.tokens(1)
        await ws.say(ping=7)
        await (await ws.connection.ping())
        assert await ws.end() == 1000
    assert {"pong": 7} in ws.said and ws.text == oracle_text("hi", 10)


# -- D7 ---------------------------------------------------------------------------------------------------------------

SILENT = {"slots": 1, "prefill_tokens_per_s": 0.01}


@pytest.mark.parametrize("how", ["close", "drop"])
async def test_d7_a_client_that_leaves_a_silent_worker_stops_it(
    deploy: Deploy, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    up = await deploy(SILENT, api={"grace_s": 0, "headers_after_ms": 10_000})  # no write would find out
    async with talk(up) as ws:
        await ws.say(prompt="hi")
        await eventually(lambda: up.recorded.told)
        if how == "close":
            await ws.connection.close()
        else:
            ws.connection.transport.abort()
        await eventually(lambda: up.workers[0].running == 0, 3.0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_d7_a_client_that_answers_no_ping_is_cut_off(deploy: Deploy) -> None:
    up = await deploy(SILENT, api={"grace_s": 0, "heartbeat_s": 0.2})
    async with talk(up) as ws:
        await ws.say(prompt="hi")
        await eventually(lambda: up.recorded.told)
        ws.connection.transport.pause_reading()
        await eventually(lambda: up.workers[0].running == 0, 2.0)
        ws.connection.transport.abort()


@pytest.mark.parametrize("first", ["garbage", "[]", '"x"', "", "{", '{"prompt":""}', '{"foo":1}', "[" * 100_000])
async def test_d7_garbage_as_the_first_message_is_an_error_and_the_end(
    deploy: Deploy, redis_client: redis.Redis, first: str
) -> None:
    up = await deploy()
    async with talk(up) as ws:
        await ws.connection.send(first)
        assert await ws.end() == 1008
    [said] = ws.said
    assert (said["error"]["code"], said["done"]) == ("invalid_request", True)
    assert jobs(redis_client) == 0


async def test_d7_what_comes_while_a_stream_runs_is_refused_and_the_stream_goes_on(deploy: Deploy) -> None:
    up = await deploy(SLOW)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=8)
        await ws.tokens(1)
        for message in ("garbage", json.dumps({"prompt": "again"}), b"\xff\x00"):
            await ws.connection.send(message)
        assert await ws.end() == 1000
    refused = [each for each in ws.said if "error" in each]
    assert [(each["error"]["code"], each["done"]) for each in refused] == [("invalid_request", False)] * 3
    assert ws.text == oracle_text("hi", 8) and len(up.recorded.told) == 1


async def test_d7_a_message_that_is_too_large_closes_with_1009(deploy: Deploy) -> None:
    up = await deploy(SLOW, api={"max_body_bytes": 10_000, "grace_s": 0})
    async with talk(up) as ws:
        await ws.connection.send("x" * 20_000)
        assert await ws.end() == 1009
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=10_000)
        await ws.tokens(1)
        await ws.connection.send("x" * 20_000)
        assert await ws.end() == 1009
        await eventually(up.is_idle)


# -- what leaving means ------------------------------------------------------------------------------------------------


async def test_a_client_that_comes_back_in_time_goes_on(deploy: Deploy) -> None:
    up = await deploy(SLOW, api={"grace_s": 5}, pods=2)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=10)
        await ws.tokens(2)
        ws.connection.transport.abort()
    async with talk(up, 1) as again:
        await again.say(resume=ws.said[-1]["id"])
        assert await again.end() == 1000
    assert ws.text + again.text == oracle_text("hi", 10)


@pytest.mark.parametrize("on_disconnect", ["cancel", 0])
async def test_on_disconnect_says_what_leaving_means(deploy: Deploy, on_disconnect: str | int) -> None:
    up = await deploy(SLOW, api={"grace_s": 60})
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=10_000, on_disconnect=on_disconnect)
        await ws.tokens(1)
    await eventually(up.is_idle)


async def test_on_disconnect_may_say_that_it_goes_on(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 100.0}, api={"grace_s": 0})
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=30, on_disconnect="continue")
        await ws.tokens(1)
    job = ws.said[0]["id"].partition(".")[0]
    await eventually(up.is_idle)
    assert await up.state_of(job) == "done"


async def test_the_members_that_stand_in_for_headers_are_read_as_strictly(deploy: Deploy) -> None:
    up = await deploy()
    for member, value in (
        ("on_disconnect", "later"),
        ("on_disconnect", True),
        ("priority", "best"),
        ("queue_timeout", -1),
        ("stream", False),
        ("resume", "x"),
        ("resume", 5),
    ):
        async with talk(up) as ws:
            await ws.say(**{"prompt": "hi", member: value} if member != "resume" else {member: value})
            assert await ws.end() == 1008
        assert ws.said[0]["error"]["param"] == member


# -- who may ----------------------------------------------------------------------------------------------------------


async def test_i2_without_a_key_there_is_no_connection(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=KEYS)
    for options in (
        {},
        {"additional_headers": {"authorization": "Bearer sk-alic"}},
        {"subprotocols": ["headrace", "bearer.wrong"]},
        {"path": "/ws/chat?key=sk-alice"},
    ):
        with pytest.raises(InvalidStatus) as caught:
            async with talk(up, **options):
                pass
        response = caught.value.response
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"
    assert jobs(redis_client) == 0


async def test_i4_a_key_as_header_or_as_subprotocol_is_taken_and_not_shown(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    up = await deploy(keys=KEYS)
    caplog.set_level(logging.WARNING, "websockets.client")  # the test's own end
    caplog.set_level(logging.DEBUG)
    for options in (
        {"additional_headers": {"authorization": "bearer sk-alice"}},
        {"subprotocols": ["headrace", "bearer.sk-alice"]},
    ):
        async with talk(up, path="/ws/chat?marker", **options) as ws:
            assert ws.connection.subprotocol == ("headrace" if "subprotocols" in options else None)
            await ws.say(prompt="hi", max_tokens=1)
            assert await ws.end() == 1000
        async with talk(up, additional_headers={"authorization": "Bearer sk-alice"}) as again:
            await again.say(resume=ws.said[0]["id"])
            assert await again.end() == 1000
    shown = [record.getMessage() for record in caplog.records]
    assert not any("sk-alice" in line or "marker" in line for line in shown)


# -- trouble ----------------------------------------------------------------------------------------------------------


async def test_a8_a_failure_is_said_and_closes_with_1011(deploy: Deploy) -> None:
    up = await deploy({"script": ["A"], "script_end": "error"})
    async with talk(up) as ws:
        await ws.say(prompt="hi")
        assert await ws.end() == 1011
    assert ws.said[-1] == {
        "error": {"code": "engine_error", "message": "the scripted engine was told to fail"},
        "done": True,
        "id": ws.said[-1]["id"],
    }


@pytest.mark.parametrize(
    ("ask", "code", "close"),
    [
        ({"prompt": "x" * 400}, "context_length_exceeded", 1008),
        ({"prompt": "x", "model": "nobody"}, "model_not_found", 1008),
        ({"resume": "0" * 32 + ".1-1"}, "stream_not_found", 1008),
    ],
)
async def test_h8_errors_that_are_known_early(deploy: Deploy, ask: dict[str, Any], code: str, close: int) -> None:
    up = await deploy({"context_tokens": 64})
    async with talk(up) as ws:
        await ws.say(**ask)
        assert await ws.end() == close
    [said] = ws.said
    assert (said["error"]["code"], said["done"]) == (code, True)


async def test_there_is_no_other_address_for_websockets(deploy: Deploy, caplog: pytest.LogCaptureFixture) -> None:
    up = await deploy()
    for path in ("/ws/nope", "/v1/chat/completions", "/"):
        with pytest.raises(InvalidStatus) as caught:
            async with talk(up, path=path):
                pass
        assert caught.value.response.status_code == 403
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert (await up.ask("GET", "/ws/chat")).json == {
        "error": {"code": "not_found", "message": "there is no such address here"},
        "done": True,
    }


async def test_a_full_queue_closes_with_1013(deploy: Deploy) -> None:
    up = await deploy({"slots": 1, **SLOW}, queue={"max_waiting_jobs": 1}, api={"grace_s": 0})
    async with up.open(max_tokens=5000), talk(up) as waiting, talk(up) as ws:
        await waiting.say(prompt="hi")
        await eventually(lambda: up.state().tail.readers == 2)
        await ws.say(prompt="hi")
        assert await ws.end() == 1013
    assert ws.said[0]["error"]["code"] == "queue_full"


async def test_a_client_that_asks_nothing_is_sent_away(deploy: Deploy) -> None:
    up = await deploy(api={"body_timeout_s": 0.2})
    async with talk(up) as ws:
        assert await ws.end() == 1008
    assert ws.said[0]["error"]["code"] == "body_timeout"


async def test_a1_a_request_that_waits_hears_of_it(deploy: Deploy) -> None:
    up = await deploy({"slots": 1, **SLOW}, api={"headers_after_ms": 50, "heartbeat_s": 0.1, "grace_s": 0})
    async with up.open(max_tokens=5000) as running, talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=1)
        first = await ws.next()
        assert first["id"].endswith(".0-1") and first["token"] == ""
        assert (await ws.next())["note"].startswith("queued")
        assert (await ws.next())["note"].startswith("queued")
        await up.ask("DELETE", f"/v1/streams/{running.job}")
        assert await ws.end() == 1000
    assert all("done" in each for each in ws.said) and ws.text == oracle_text("hi", 1)


async def test_d6_a_client_that_takes_nothing_is_cut_off(deploy: Deploy) -> None:
    up = await deploy({"script": ["x" * 30_000] * 300}, api={"slow_client_timeout_s": 0.3, "heartbeat_s": 0.2})
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", int(up.pods[0].url.rpartition(":")[2])))
    async with connect("ws://localhost/ws/chat", sock=raw, proxy=None, ping_interval=None) as connection:
        await connection.send(json.dumps({"prompt": "hi"}))
        connection.transport.pause_reading()
        await eventually(lambda: up.recorded.told)
        await eventually(lambda: up.state().tail.readers == 0)
        connection.transport.abort()


async def test_f5_a_pod_that_ends_closes_with_1001_and_the_client_goes_on_elsewhere(deploy: Deploy) -> None:
    up = await deploy(SLOW, api={"drain_s": 1.0, "grace_s": 5}, pods=2)
    async with talk(up) as ws:
        await ws.say(prompt="hi", max_tokens=60)
        await ws.tokens(2)
        up.state().drain()
        stopping = asyncio.create_task(up.pods[0].stop())
        assert await ws.end() == 1001
        await stopping
    assert not any(each["done"] for each in ws.said)
    async with talk(up, 1) as again:
        await again.say(resume=ws.said[-1]["id"])
        assert await again.end() == 1000
    assert ws.text + again.text == oracle_text("hi", 60)
    assert len(ws.said) > 10  # it went on for the drain time


async def test_f5_a_pod_that_ends_does_not_wait_for_a_first_message(deploy: Deploy) -> None:
    up = await deploy(api={"drain_s": 20.0, "heartbeat_s": 0.2})
    async with talk(up) as ws:
        await eventually(lambda: up.state().beats)
        up.state().drain()
        assert await ws.end() == 1001
    assert ws.said == []


async def test_f5_a_pod_that_ends_takes_no_new_one(deploy: Deploy) -> None:
    up = await deploy()
    up.state().drain()
    with pytest.raises(InvalidStatus) as caught:
        async with talk(up):
            pass
    assert caught.value.response.status_code == 503
