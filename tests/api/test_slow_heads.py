"""A client that never comes to the end of its request's head holds its connection only for so long."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from tests.api.conftest import Deploy
from tests.api.deployment import Deployment

LIMIT_S = 0.3
WITHIN_S = 3 * (LIMIT_S + 1.0)
"""Connections are looked at once a second."""


async def connect(up: Deployment) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(up.pods[0].url)
    return await asyncio.open_connection(where.hostname, where.port)


async def test_a_head_that_does_not_end_is_a_408(deploy: Deploy) -> None:
    up = await deploy(api={"header_timeout_s": LIMIT_S})
    reader, writer = await connect(up)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
    async with asyncio.timeout(WITHIN_S):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"headers_timeout"' in answer
    writer.close()


async def test_a_head_that_comes_byte_by_byte_is_a_408_too(deploy: Deploy) -> None:
    up = await deploy(api={"header_timeout_s": LIMIT_S})
    reader, writer = await connect(up)
    answer = asyncio.create_task(reader.read())
    async with asyncio.timeout(WITHIN_S):
        for byte in b"GET /healthz HTTP/1.1\r\nx-slow: " + b"a" * 1000:
            if answer.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait([answer], timeout=0.02)
    assert (await answer).startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_a_connection_that_asks_nothing_is_closed_without_a_word(deploy: Deploy) -> None:
    up = await deploy(api={"header_timeout_s": LIMIT_S})
    reader, writer = await connect(up)
    async with asyncio.timeout(WITHIN_S):
        assert await reader.read() == b""
    writer.close()


async def test_streams_and_connections_that_were_used_are_left_alone(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 10.0}, api={"header_timeout_s": LIMIT_S})
    reader, writer = await connect(up)
    request = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    writer.write(request)
    await reader.readuntil(b'"ok"}')
    assert (await up.stream(max_tokens=20)).events[-1].data == "[DONE]"  # two seconds
    writer.write(request)
    assert (await reader.readuntil(b'"ok"}')).startswith(b"HTTP/1.1 200 ")
    writer.close()
