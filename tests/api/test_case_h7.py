"""H7: what a hostile client sends is refused early, and nobody else notices."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis

from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment, raw
from tests.api.undisturbed import undisturbed

LIMIT = 200_000
READ = 256_000
"""What the event loop reads at a time: so much may come in before anybody can say stop."""
KERNEL = 12_000_000
"""What the kernel's buffers on both sides take of what nobody reads."""
routes = pytest.mark.parametrize("route", PATHS)


@pytest.fixture
async def up(deploy: Deploy) -> AsyncIterator[Deployment]:
    yield await deploy({"tokens_per_s": 50.0}, api={"max_body_bytes": LIMIT, "body_timeout_s": 0.4})


def head(route: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {PATHS[route]} HTTP/1.1", "host: localhost", *lines, "", ""]).encode()


def chunked(size: int) -> Iterator[bytes]:
    for _ in range(size // 65_536):
        yield b"10000\r\n" + b" " * 65_536 + b"\r\n"
    yield b"0\r\n\r\n"


class Meter:
    """Counts what a pod's connections read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from headrace.api.server import PodProtocol

        self.read = 0
        received = PodProtocol.data_received

        def count(protocol: PodProtocol, data: bytes) -> None:
            self.read += len(data)
            received(protocol, data)

        monkeypatch.setattr(PodProtocol, "data_received", count)


@routes
@pytest.mark.parametrize("is_declared", [True, False], ids=["declared", "chunked"])
async def test_h7_a_body_of_100_megabytes(
    up: Deployment, monkeypatch: pytest.MonkeyPatch, route: str, is_declared: bool
) -> None:
    meter, size = Meter(monkeypatch), 100_000_000
    parts: Iterator[bytes] = chunked(size)
    if is_declared:
        parts = itertools.repeat(b" " * 100_000, 1000)
    line = f"content-length: {size}" if is_declared else "transfer-encoding: chunked"
    async with undisturbed(up):
        before = meter.read
        sent, answer = await raw(up.pods[0].url, itertools.chain([head(route, line)], parts))
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert answer.headers["connection"] == "close"
        assert meter.read - before <= LIMIT + READ
        assert sent < KERNEL


async def test_h7_a_body_where_none_is_read(up: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    ended = await up.stream(max_tokens=2)
    position = f"last-event-id: {ended.events[0].id}"
    up.recorded.told.clear()
    async with undisturbed(up):
        for path, lines, status in (("/v1/nope", [], 404), (PATHS["chat"], [position], 200)):
            before = meter.read
            request = head("chat", "content-length: 100000000", *lines).replace(PATHS["chat"].encode(), path.encode())
            sent, answer = await raw(up.pods[0].url, [request, *[b" " * 100_000] * 1000])
            assert answer.status == status
            assert meter.read - before <= LIMIT + READ
            assert sent < KERNEL


@routes
async def test_h7_a_header_of_64_kilobytes(up: Deployment, route: str) -> None:
    async with undisturbed(up):
        answer = await up.post(route, headers={"x-large": "a" * 65_536})
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
        many = {f"x-{index}": "a" * 100 for index in range(640)}
        assert (await up.post(route, headers=many)).status == 431


async def test_h7_headers_without_end(up: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    async with undisturbed(up):
        for line in (b"x-%d: a\r\n" % 7 * 1000, b"a" * 10_000):
            before = meter.read
            sent, answer = await raw(up.pods[0].url, [head("chat")[:-2], *[line] * 3000])
            assert (answer.status, answer.error["code"]) == (431, "headers_too_large")
            assert meter.read - before < 500_000 and sent < KERNEL


@routes
async def test_h7_a_slow_body(up: Deployment, route: str) -> None:
    async with undisturbed(up):
        asked = time.monotonic()
        parts = [head(route, "content-length: 1000") + b"{", *[b" "] * 500]
        sent, answer = await raw(up.pods[0].url, parts, pause_s=0.1)
        assert 0.35 < time.monotonic() - asked < 1.5 and sent < 1000
        assert (answer.status, answer.error["code"]) == (408, "body_timeout")
        assert answer.headers["connection"] == "close"


async def refused(up: Deployment, route: str, body: bytes) -> Answer:
    asked = time.monotonic()
    answer = await up.ask("POST", PATHS[route], content=body)
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), answer.body
    assert time.monotonic() - asked < 1.5  # three times what it may take
    assert len(answer.body) < 1000
    return answer


@routes
@pytest.mark.parametrize("field", ["tools", "unknown", "stop", "messages", "prompt"])
async def test_h7_deep_nesting(deploy: Deploy, route: str, field: str) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    async with undisturbed(up):
        for depth in (65, 100, 500, 3000, 100_000, 1_000_000):
            for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
                nested = opening * depth + b"1" + closing * depth
                body = json.dumps(up.body(route)).encode()[:-1] + b',"%b":%b}' % (field.encode(), nested)
                if len(body) < up.settings.api.max_body_bytes:
                    await refused(up, route, body)


LONG = "an integer of 5,000 digits"
HUGE: list[tuple[str, Any]] = [
    ("n", 100_000),
    ("n", LONG),
    ("max_tokens", LONG),
    ("seed", LONG),
    ("temperature", 1e308),
    ("top_p", -1),
    ("logit_bias", {str(index): 1 for index in range(300_000)}),
    ("stop", ["x"] * 100_000),
    ("stream_options", {"include_usage": LONG}),
]


@routes
async def test_h7_extreme_values(deploy: Deploy, redis_client: redis.Redis, route: str) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    other = ("messages", [{"role": "user", "content": "x"}] * 10_000) if route == "chat" else ("best_of", 100_000)
    bodies = [(name, _dump(up.body(route, **{name: value}))) for name, value in [*HUGE, other]]
    async with undisturbed(up):
        for name, body in bodies:
            assert str((await refused(up, route, body)).error["param"]).startswith(name)
        assert len(redis_client.keys("hr:*:job:*")) == 1


def _dump(body: dict[str, Any]) -> bytes:
    """JSON, with `LONG` in place of an integer that the standard library refuses to write."""
    return json.dumps(body).replace(f'"{LONG}"', "1" + "0" * 4999).encode()
