"""A1: a connection that says nothing is kept open by comments that no client takes for an event."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Deployment
from tests.api.reading import content
from tests.support import eventually

BEAT_S = 0.2
routes = pytest.mark.parametrize("route", PATHS)


@pytest.fixture
async def sdk(deploy: Deploy) -> AsyncIterator[tuple[Deployment, openai.AsyncOpenAI]]:
    """Two tokens, three heartbeats apart, and the official client."""
    up = await deploy({"script": ["A", "B"], "tokens_per_s": 1 / (3 * BEAT_S)}, api={"heartbeat_s": BEAT_S})
    async with openai.AsyncOpenAI(base_url=f"{up.pods[0].url}/v1", api_key="-", max_retries=0) as client:
        yield up, client


async def test_a1_the_official_client_reads_through_heartbeats(
    sdk: tuple[Deployment, openai.AsyncOpenAI],
) -> None:
    _, client = sdk
    said = []
    async for chunk in await client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hi"}], stream=True
    ):
        said.append(chunk.choices[0].delta.content)
    assert said == ["", "A", "B", None]


async def test_a1_the_official_client_reads_completions_through_heartbeats(
    sdk: tuple[Deployment, openai.AsyncOpenAI],
) -> None:
    _, client = sdk
    stream = await client.completions.create(model="scripted", prompt="hi", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["A", "B", ""]


@routes
async def test_a1_a_heartbeat_is_one_line_between_events(
    sdk: tuple[Deployment, openai.AsyncOpenAI], route: str
) -> None:
    up, _ = sdk
    answer = await up.stream(route)
    assert content(answer.events) == "AB"  # the reader allows comments before an event only, each one line
    beats = re.findall(rb"^(:.*)\n", answer.body, re.MULTILINE)
    assert len(beats) >= 2 and set(beats) == {b": working"}


async def gaps(response: httpx.Response, stop: bytes) -> list[float]:
    """The times between bytes until `stop` has come, from the headers on."""
    moments, read = [time.monotonic()], b""
    async for part in response.aiter_raw():
        moments.append(time.monotonic())
        read += part
        if stop in read:
            break
    return [after - before for before, after in itertools.pairwise(moments)]


@routes
@pytest.mark.parametrize(
    "model",
    [
        {"script": ["A", "B"], "tokens_per_s": 1.0, "prefill_tokens_per_s": 1.0},  # silent before and between tokens
        {"script": ["S", "T", "O", "P", "I", "N", "G"], "tokens_per_s": 7.0},  # tokens come, but their text is held
    ],
    ids=["silent", "held"],
)
async def test_a1_no_gap_is_longer_than_the_interval(deploy: Deploy, route: str, model: dict[str, object]) -> None:
    up = await deploy(model, api={"heartbeat_s": BEAT_S})
    async with up.open(route, stop="STOPINGX") as opened:
        measured = await gaps(opened.response, b"[DONE]")
    assert max(measured) <= BEAT_S * 1.2, measured


@routes
async def test_a1_a_waiting_request_is_told_its_place(deploy: Deploy, route: str) -> None:
    up = await deploy(
        {"slots": 1, "tokens_per_s": 10.0}, api={"heartbeat_s": BEAT_S, "headers_after_ms": 50, "grace_s": 0}
    )
    async with up.open(max_tokens=500) as running:
        await running.until(b"content")
        async with up.open(route) as first:
            await first.until(b": queued, 0 before this request\n")
            async with up.open(route, max_tokens=2) as second:
                await second.until(b": queued, 1 before this request\n")
                await up.ask("DELETE", f"/v1/streams/{first.job}")
                await second.until(b": queued, 0 before this request\n")
                await up.ask("DELETE", f"/v1/streams/{running.job}")
                answer = await second.rest()
    assert len(content(answer.events).split()) == 2
    assert b": queued" not in answer.body.partition(b"data:")[2]


async def test_a1_headers_go_out_after_the_configured_time(deploy: Deploy) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 10.0}, api={"headers_after_ms": 100, "grace_s": 0})
    async with up.open(max_tokens=500) as running:
        await running.until(b"content")
        for _ in range(20):  # the timer may ring a little early, by another clock than the one it was set by
            started = time.monotonic()
            async with up.open() as waiting:
                took_s = time.monotonic() - started
                assert 0.09 < took_s < 0.3
                await waiting.until(b": queued")
    await eventually(up.is_idle)


async def test_a1_a_client_that_has_closed_its_side_and_reads_slowly_is_not_cut_off(deploy: Deploy) -> None:
    """The two writes that find out whether anybody is there must not count as time in which nothing was taken."""
    script = {"script": ["x" * 30_000] * 200, "tokens_per_s": 200.0}
    up = await deploy(script, api={"heartbeat_s": BEAT_S, "slow_client_timeout_s": 60.0})
    body = b'{"model":"scripted","prompt":"hi","stream":true}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(up.pods[0].url.rpartition(":")[2])))
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    writer.write(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    await eventually(lambda: any(stream.is_writing for stream in up.state().beats))
    writer.write_eof()
    looked_at = time.monotonic()
    await eventually(lambda: time.monotonic() - looked_at > 3 * BEAT_S or not up.state().beats)
    assert len(up.state().beats) == 1
    read = await reader.read()
    assert b"data: [DONE]\n\n" in read
    writer.close()
    await writer.wait_closed()
