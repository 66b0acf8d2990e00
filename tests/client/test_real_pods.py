"""The client against real pods: whatever is cut and wherever, the text is the one that the engine made."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx
import pytest

from headrace.broker.embedded import EmbeddedServer
from headrace.client import Chunk, Client, RequestRefused
from headrace.workers.engines.scripted import oracle
from tests.cutting import cutting
from tests.serving import scripted_settings, serving
from tests.support import eventually

TEXT = "cut me"
TOKENS = 40
EXPECTED = "".join(f" {oracle(TEXT, 7, 0, index):08x}" for index in range(TOKENS))


def stream(client: Client, max_tokens: int = TOKENS) -> AsyncGenerator[Chunk, None]:
    return client.chat([{"role": "user", "content": TEXT}], model="scripted", max_tokens=max_tokens, seed=7)


async def test_an_answer_cut_at_many_places_is_whole(redis_server: EmbeddedServer) -> None:
    chance = random.Random(3)
    settings = scripted_settings(redis_server, tokens_per_s=500)
    async with serving(settings, redis_server, pods=2) as pods:
        for _ in range(12):
            # headers alone are some 230 bytes: with a cut in them the request is sent again
            limits = [chance.randrange(0, 3000) for _ in range(6)]
            async with (
                cutting(pods[0].url, limits) as one,
                cutting(pods[1].url, limits) as two,
                Client([one, two], backoff_s=0.001) as client,
            ):
                chunks = [chunk async for chunk in stream(client)]
            assert not limits
            assert "".join(chunk.text for chunk in chunks) == EXPECTED
            assert [chunk.usage["completion_tokens"] for chunk in chunks if chunk.usage] == [TOKENS]
            assert len({chunk.position for chunk in chunks}) == len(chunks)


async def test_a_pod_that_dies_leaves_its_stream_to_another(redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=50)
    places: list[str] = []
    async with (
        serving(settings, redis_server, pods=2) as [one, two],
        Client([one.url, two.url], backoff_s=0.01, on_reconnect=places.append) as client,
    ):
        text = ""
        async for chunk in stream(client):
            text += chunk.text
            if len(text) >= 9 * 5 and not places:  # a chunk may hold several tokens
                one.die()
    assert text == EXPECTED
    assert places == [two.url]


async def test_leaving_early_ends_the_job(redis_server: EmbeddedServer) -> None:
    settings = scripted_settings(redis_server, tokens_per_s=20)
    async with serving(settings, redis_server) as [pod], Client([pod.url]) as client, httpx.AsyncClient() as http:
        async with aclosing(stream(client, max_tokens=5000)) as chunks:
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
