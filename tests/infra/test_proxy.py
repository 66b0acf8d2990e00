"""Real nginx and HAProxy before two pods: what a balancer can do to streams, it does not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import httpx
import msgspec
import pytest

from headrace.api.wire import BY_NAME
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import BodyTooLarge
from headrace.broker.settings import Settings
from headrace.client import Client
from headrace.workers.engines.scripted import oracle
from tests.api.deployment import raw
from tests.infra.proxies import NAMES, SOURCE, Proxy, proxy
from tests.serving import Pod, scripted_settings, serving
from tests.support import eventually

each = pytest.mark.parametrize("name", NAMES)
TEXT = "through"


def expected(count: int) -> str:
    return "".join(f" {oracle(TEXT, 0, 0, index):08x}" for index in range(count))


def body(count: int, *, stream: bool = True) -> dict[str, object]:
    return {
        "model": "scripted",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": count,
        "stream": stream,
    }


class Front(NamedTuple):
    """A proxy and the pods behind it."""

    proxy: Proxy
    pods: list[Pod]


@asynccontextmanager
async def front(
    name: str, redis_server: EmbeddedServer, settings: Settings, replaced: dict[str, str] | None = None
) -> AsyncIterator[Front]:
    async with serving(settings, redis_server, pods=2) as pods:
        with proxy(name, [pod.url for pod in pods], replaced) as running:
            await asyncio.to_thread(running.wait)
            yield Front(running, pods)


class Stream:
    """The text of a response, as far as it has come."""

    def __init__(self, response: httpx.Response) -> None:
        self.job = response.headers["x-request-id"]
        self.text = ""
        self.is_done = False
        self._lines = response.aiter_lines()

    async def read(self, characters: int = 1 << 30) -> None:
        """Until there is so much text, or the end."""
        while len(self.text) < characters and (line := await anext(self._lines, None)) is not None:
            if line == "data: [DONE]":
                self.is_done = True
            elif line.startswith("data: "):
                event = msgspec.json.decode(line[6:])
                assert "error" not in event, event
                if event["choices"]:
                    self.text += event["choices"][0]["delta"].get("content") or ""


@asynccontextmanager
async def streaming(http: httpx.AsyncClient, count: int) -> AsyncIterator[Stream]:
    async with http.stream("POST", "/v1/chat/completions", json=body(count)) as response:
        assert response.status_code == 200
        yield Stream(response)


@each
async def test_nothing_is_buffered(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=5)
    async with (
        front(name, redis_server, settings) as it,
        httpx.AsyncClient(base_url=it.proxy.url) as http,
        streaming(http, 10) as stream,
    ):
        await stream.read(9)
        async with httpx.AsyncClient(base_url=it.pods[0].url) as pod:
            state = (await pod.get(f"/v1/streams/{stream.job}/status")).json()["state"]
        assert state == "running"
        await stream.read()
        assert (stream.text, stream.is_done) == (expected(10), True)


@each
async def test_heartbeats_outlast_the_read_timeout(name: str, redis_server: EmbeddedServer) -> None:
    """A stream that is silent for longer than the proxy waits for a byte: the same in seconds as ten minutes are."""
    settings = scripted_settings(redis_server, tokens_per_s=0.25)  # a token every 4 s
    api = msgspec.structs.replace(settings.api, heartbeat_s=0.4)
    settings = msgspec.structs.replace(settings, api=api)
    old = "proxy_read_timeout 660s" if name == "nginx" else "timeout server 660s"
    async with (
        front(name, redis_server, settings, {old: old.replace("660s", "3s")}) as it,
        httpx.AsyncClient(base_url=it.proxy.url, timeout=30) as http,
        streaming(http, 2) as stream,
    ):
        await stream.read()
        assert (stream.text, stream.is_done) == (expected(2), True)


@each
def test_ten_minutes_of_silence_are_allowed(name: str) -> None:
    text = (SOURCE / {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}[name]).read_text("utf-8")
    wanted = {
        "nginx": ("proxy_read_timeout 660s", "worker_shutdown_timeout 660s", "proxy_buffering off"),
        "haproxy": ("timeout server 660s", "timeout client 660s", "hard-stop-after 660s"),
    }
    for line in wanted[name]:
        assert line in text


@each
async def test_a_reload_cuts_no_stream(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    async with (
        front(name, redis_server, settings) as it,
        httpx.AsyncClient(base_url=it.proxy.url) as http,
        streaming(http, 100) as stream,
    ):
        for _ in range(2):
            await stream.read(len(stream.text) + 9 * 10)
            it.proxy.reload()
        await stream.read(len(stream.text) + 9 * 10)
        async with httpx.AsyncClient(base_url=it.proxy.url) as new:  # a connection to the new workers
            assert (await new.get("/readyz")).status_code == 200
        await stream.read()
        assert (stream.text, stream.is_done) == (expected(100), True)


@each
async def test_a_client_goes_on_behind_the_proxy_when_its_pod_is_killed(
    name: str, redis_server: EmbeddedServer
) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    async with front(name, redis_server, settings) as it:
        places: list[str] = []
        async with Client([it.proxy.url], backoff_s=0.05, on_reconnect=places.append) as client:
            text = ""
            chunks = client.chat([{"role": "user", "content": TEXT}], model="scripted", max_tokens=60)
            async for chunk in chunks:
                text += chunk.text
                if text == expected(5):
                    _pod_of_the_stream(it.pods).die()
            assert text == expected(60)
            assert places
        async with httpx.AsyncClient(base_url=it.proxy.url) as http:  # the dead pod is passed over, for a POST too
            for _ in range(4):
                answer = await http.post("/v1/chat/completions", json=body(1, stream=False))
                assert answer.status_code == 200


def _pod_of_the_stream(pods: list[Pod]) -> Pod:
    [found] = [pod for pod in pods if pod.config.app.state.pod.beats]  # type: ignore[union-attr]
    return found


@each
async def test_a_pod_that_is_not_there_is_passed_over(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server)
    async with serving(settings, redis_server) as [pod]:
        with proxy(name, ["http://127.0.0.1:9", pod.url]) as running:
            await asyncio.to_thread(running.wait)
            async with httpx.AsyncClient(base_url=running.url) as http:
                for _ in range(6):
                    answer = await http.post("/v1/chat/completions", json=body(2, stream=False))
                    assert answer.json()["choices"][0]["message"]["content"] == expected(2)


@each
async def test_a_client_that_leaves_is_noticed_behind_the_proxy(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    api = msgspec.structs.replace(settings.api, grace_s=0.2)
    settings = msgspec.structs.replace(settings, api=api)
    async with front(name, redis_server, settings) as it, httpx.AsyncClient(base_url=it.proxy.url) as http:
        async with streaming(http, 5000) as stream:
            await stream.read(9)

        async def is_cancelled() -> bool:
            answer = await http.get(f"/v1/streams/{stream.job}/status")
            return bool(answer.json()["state"] == "cancelled")

        await eventually(is_cancelled)


@each
async def test_http2_reaches_the_client(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=100)
    async with (
        front(name, redis_server, settings) as it,
        httpx.AsyncClient(base_url=it.proxy.tls_url, http2=True, verify=it.proxy.trust) as http,
    ):
        async with streaming(http, 30) as one, streaming(http, 30) as two:  # both on one connection
            await one.read(9)
            await two.read(9)
            await one.read()
            await two.read()
            assert one.text == two.text == expected(30)
        assert (await http.get("/healthz")).http_version == "HTTP/2"
        assert (await http.get("/healthz")).headers.get("x-powered-by") is None


@each
async def test_the_pods_own_words_pass_through(name: str, redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server)
    async with front(name, redis_server, settings) as it, httpx.AsyncClient(base_url=it.proxy.url) as http:
        assert (await http.get("/nowhere")).json()["error"]["code"] == "not_found"
        assert (await http.get("/metrics")).status_code == 404
        assert "error" not in (await http.get("/readyz")).text


async def test_a_body_that_is_too_large_is_refused_by_nginx_in_the_pods_words(redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server)
    async with front("nginx", redis_server, settings) as it, httpx.AsyncClient(base_url=it.proxy.url) as http:
        large = await http.post("/v1/chat/completions", content=b"x" * (settings.api.max_body_bytes + 1))
        assert (large.status_code, large.content) == (413, BY_NAME["openai.chat"].error_body(BodyTooLarge()))
        allowed = await http.post("/v1/chat/completions", content=b"x" * settings.api.max_body_bytes)
        assert (allowed.status_code, allowed.json()["error"]["code"]) == (400, "invalid_request")


@each
async def test_a_body_that_is_too_large_is_told_so_and_not_bad_gateway(name: str, redis_server: EmbeddedServer) -> None:
    """The pod answers while the proxy still sends: were the connection reset then, the answer would be lost."""
    settings = scripted_settings(redis_server)
    size = settings.api.max_body_bytes * 2
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n%b\r\n\r\n"
    declared = [head % b"content-length: %d" % size, *[b" " * 65_536] * (size // 65_536)]
    chunks = [head % b"transfer-encoding: chunked", *[b"10000\r\n%b\r\n" % (b" " * 65_536)] * (size // 65_536)]
    in_chunks = [*chunks, b"0\r\n\r\n"]
    # nginx would refuse it itself, and must not gather it first
    replaced = {"client_max_body_size 4m": "client_max_body_size 0"} if name == "nginx" else {}
    async with front(name, redis_server, settings, replaced) as it:
        for parts in [declared, in_chunks] * 6:
            _, answer = await raw(it.proxy.url, parts)
            assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")


@each
async def test_the_callers_request_id_reaches_the_pods_log(
    name: str, redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    settings = scripted_settings(redis_server)
    caplog.set_level(logging.INFO, "headrace.api.request_log")
    async with front(name, redis_server, settings) as it, httpx.AsyncClient(base_url=it.proxy.url) as http:
        for own in ("order-7 of!", "order-7", None):
            headers = {} if own is None else {"X-Request-Id": own}
            answer = await http.post("/v1/chat/completions", json=body(1, stream=False), headers=headers)
            assert answer.status_code == 200
            assert len(answer.headers["x-request-id"]) == 32  # the job, not what was sent
    logged = [record.__dict__["user_request_id"] for record in caplog.records if "user_request_id" in record.__dict__]
    replaced, kept, made = logged
    assert kept == "order-7"
    assert replaced and made and len({replaced, kept, made}) == 3  # what is no id gets one of the proxy's


class Recorder:
    """A server in a pod's place that keeps the heads of requests by their paths. A proxy's probes come between."""

    def __init__(self) -> None:
        self.heads: dict[str, dict[str, str]] = {}

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        self.heads[first.split()[1]] = {line.split(": ", 1)[0].lower(): line.split(": ", 1)[1] for line in lines}
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@each
async def test_the_pod_is_told_who_the_client_is_and_not_what_it_claims(name: str) -> None:
    recorder = Recorder()
    async with await asyncio.start_server(recorder, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        with proxy(name, [url]) as running:
            await asyncio.to_thread(running.wait)
            async with httpx.AsyncClient(base_url=running.url) as http:
                await http.get("/spoofed", headers={"X-Forwarded-For": "203.0.113.9", "X-Real-IP": "203.0.113.9"})
            async with httpx.AsyncClient(base_url=running.tls_url, verify=running.trust) as http:
                await http.get("/tls")
    plain, tls = recorder.heads["/spoofed"], recorder.heads["/tls"]
    assert plain["x-forwarded-for"] == "127.0.0.1"
    assert (plain["x-forwarded-proto"], tls["x-forwarded-proto"]) == ("http", "https")


async def test_behind_another_balancer_nginx_believes_only_that_one() -> None:
    recorder = Recorder()
    async with await asyncio.start_server(recorder, "127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        trusting = {"set_real_ip_from 10.0.0.0/8": "set_real_ip_from 127.0.0.0/8"}
        with proxy("nginx", [url], trusting) as running:
            await asyncio.to_thread(running.wait)
            async with httpx.AsyncClient(base_url=running.url) as http:
                await http.get("/spoofed", headers={"X-Forwarded-For": "192.0.2.1, 203.0.113.9"})
    # what came before it, the client may have made up
    assert recorder.heads["/spoofed"]["x-forwarded-for"] == "203.0.113.9"
