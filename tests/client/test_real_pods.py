"""The client against real pods: whatever is cut and wherever, the text is the one that the engine made."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest

from headrace.broker.embedded import EmbeddedServer
from headrace.client import Chunk, Client, RequestRefused
from headrace.workers.engines.scripted import oracle
from tests.serving import scripted_settings, serving
from tests.support import eventually

TEXT = "cut me"
TOKENS = 40
EXPECTED = "".join(" %08x" % oracle(TEXT, 7, 0, index) for index in range(TOKENS))


async def read(client: Client) -> list[Chunk]:
    messages = [{"role": "user", "content": TEXT}]
    return [chunk async for chunk in client.chat(messages, model="scripted", max_tokens=TOKENS, seed=7)]


class CuttingProxy:
    """Passes a connection on to a pod and breaks it after so many bytes of the response, one number a connection."""

    def __init__(self, target: str, limits: list[int]) -> None:
        self._port = int(target.rpartition(":")[2])
        self._limits = limits
        self.url = ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", self._port)
        left = self._limits.pop(0) if self._limits else 1 << 30
        pod_writer.write(await reader.readuntil(b"\r\n\r\n"))
        sending = asyncio.create_task(self._pass_on(reader, pod_writer))
        with contextlib.suppress(ConnectionError):
            while left and (data := await pod_reader.read(min(left, 4096))):
                writer.write(data)
                left -= len(data)
                await writer.drain()
        sending.cancel()
        for each in (writer, pod_writer):
            each.close()
            with contextlib.suppress(ConnectionError):
                await each.wait_closed()

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)


@contextlib.asynccontextmanager
async def cutting(target: str, limits: list[int]) -> AsyncIterator[str]:
    listener = await asyncio.start_server(CuttingProxy(target, limits), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await listener.wait_closed()


async def test_an_answer_cut_at_many_places_is_whole(redis_server: EmbeddedServer) -> None:
    chance = random.Random(3)
    settings = scripted_settings(redis_server, tokens_per_s=500)
    async with serving(settings, redis_server, pods=2) as pods:
        for _ in range(12):
            # headers alone are some 230 bytes: a cut in them leaves no job to go on with
            limits = [chance.randrange(400, 3000) for _ in range(6)]
            async with cutting(pods[0].url, limits) as one, Client([one, pods[1].url], backoff_s=0.001) as client:
                chunks = await read(client)
            assert "".join(chunk.text for chunk in chunks) == EXPECTED
            assert [chunk.usage["completion_tokens"] for chunk in chunks if chunk.usage] == [TOKENS]
            assert len({chunk.position for chunk in chunks}) == len(chunks)


async def test_a_pod_that_stops_hands_its_stream_to_another(redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    places: list[str] = []
    async with serving(settings, redis_server, pods=2) as [one, two]:
        async with Client([one.url, two.url], backoff_s=0.01, on_reconnect=places.append) as client:
            reading = asyncio.create_task(read(client))
            await eventually(lambda: len(one.pod_streams) == 1)
            await one.stop()
            chunks = await reading
    assert "".join(chunk.text for chunk in chunks) == EXPECTED
    assert places == [two.url]


async def test_leaving_early_ends_the_job(redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    async with serving(settings, redis_server) as [pod], Client([pod.url]) as client, httpx.AsyncClient() as http:
        async with aclosing(
            client.chat([{"role": "user", "content": TEXT}], model="scripted", max_tokens=5000)
        ) as chunks:
            job = (await anext(chunks)).position.partition(".")[0]

        async def is_cancelled() -> bool:
            status = await http.get(f"{pod.url}/v1/streams/{job}/status")
            return bool(status.json()["state"] == "cancelled")

        await eventually(is_cancelled)
        assert await client.cancel(job) == "ended"


async def test_models_and_refusals_are_the_servers(redis_server: EmbeddedServer) -> None:
    async with serving(scripted_settings(redis_server), redis_server) as [pod], Client([pod.url]) as client:
        assert await client.models() == ["scripted"]
        with pytest.raises(RequestRefused) as raised:
            _ = [chunk async for chunk in client.chat([], model="nobody")]
        assert (raised.value.status, raised.value.code) in {(404, "model_not_found"), (400, "invalid_request")}
        with pytest.raises(RequestRefused, match="stream_not_found"):
            await client.cancel("0000" + "0" * 28)
