"""Many callers on one connection: each gets its own answer, and a break is told to all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.broker.calls import Calls
from headrace.broker.redis_wire import pack
from tests.support import eventually
from tests.users import Server


@pytest.fixture
async def calls(redis_server: Server) -> AsyncIterator[Calls]:
    pool = redis.ConnectionPool.from_url(redis_server.root_url, protocol=2, driver_info=None)
    calls = Calls(pool, 5.0)
    yield calls
    calls.close()


class Fake:
    """A server that reads commands as bytes and says what its `answer` says; None hangs up."""

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                said = self._answer(data)
                if said is None:
                    break
                writer.write(said)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open.discard(writer)


async def against(fake: Fake, use: Callable[[Calls], Awaitable[None]], timeout_s: float = 5.0) -> None:
    async with await asyncio.start_server(fake, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        pool = redis.ConnectionPool(host=host, port=port, protocol=2, driver_info=None)
        calls = Calls(pool, timeout_s)
        await use(calls)
        calls.close()
        await eventually(lambda: not fake.open)


async def test_each_caller_gets_its_own_answer(calls: Calls) -> None:
    answers = await asyncio.gather(*(calls.ask("ECHO", f"word {i}") for i in range(500)))
    assert answers == [b"word %d" % i for i in range(500)]
    clients = (await calls.ask("CLIENT", "LIST", "ID", await calls.ask("CLIENT", "ID"))).decode().splitlines()
    assert len(clients) == 1


@pytest.mark.parametrize("word", ["", "a b\r\n", "é", b"\x00\xff", 7, -1, 0.25])
async def test_words_arrive_as_they_were(calls: Calls, word: str | bytes | float) -> None:
    expected = word if isinstance(word, bytes) else str(word).encode()
    assert await calls.ask("ECHO", word) == expected


async def test_an_error_answer_is_its_callers_only(calls: Calls) -> None:
    answers = await asyncio.gather(
        calls.ask("ECHO", "a"), calls.ask("XADD", "no-id"), calls.ask("ECHO", "b"), return_exceptions=True
    )
    assert (answers[0], answers[2]) == (b"a", b"b")
    assert isinstance(answers[1], ResponseError)


async def test_who_leaves_takes_no_answer_of_another(calls: Calls) -> None:
    await calls.ask("PING")
    leaving = asyncio.create_task(calls.ask("ECHO", "mine"))
    await asyncio.sleep(0)
    staying = asyncio.create_task(calls.ask("ECHO", "yours"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"yours"
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_what_a_break_has_cut_off_is_asked_again() -> None:
    seen: list[bytes] = []

    def answer(data: bytes) -> bytes | None:
        seen.append(data)
        return None if len(seen) == 1 else b"+OK\r\n" * data.count(b"PING")

    async def use(calls: Calls) -> None:
        answers = await asyncio.gather(calls.ask("PING", "1"), calls.ask("PING", "2"))
        assert tuple(answers) == (b"OK", b"OK")

    await against(fake := Fake(answer), use)
    assert fake.connections == 2
    assert seen[0] == pack(("PING", "1")) + pack(("PING", "2")), "in one write"


async def test_after_three_breaks_the_caller_is_told() -> None:
    async def use(calls: Calls) -> None:
        with pytest.raises(RedisConnectionError):
            await calls.ask("PING")

    await against(fake := Fake(lambda data: None), use)
    assert fake.connections == 3


async def test_a_server_that_does_not_answer_is_left() -> None:
    async def use(calls: Calls) -> None:
        with pytest.raises(RedisTimeoutError):
            await calls.ask("PING")

    await against(fake := Fake(lambda data: b""), use, timeout_s=0.1)
    assert fake.connections == 3


async def test_what_is_no_answer_is_a_break() -> None:
    async def use(calls: Calls) -> None:
        with pytest.raises(RedisConnectionError, match="no answer"):
            await calls.ask("PING")

    await against(Fake(lambda data: b"nonsense\r\n"), use)


async def test_an_answer_that_nobody_asked_for_is_given_to_nobody() -> None:
    async def use(calls: Calls) -> None:
        assert await calls.ask("PING") == b"1"
        assert await calls.ask("PING") == b"1"

    await against(fake := Fake(lambda data: b"+1\r\n+2\r\n"), use)
    assert fake.connections == 2


async def test_what_is_under_way_ends_on_the_connection_that_is_let_go(calls: Calls) -> None:
    first = await calls.ask("CLIENT", "ID")
    waiting = asyncio.create_task(calls.ask("ECHO", "x"))
    await asyncio.sleep(0)
    calls.let_go()
    assert await calls.ask("CLIENT", "ID") != first
    assert await waiting == b"x"
    ids = (await calls.ask("CLIENT", "LIST")).decode()
    assert f"id={first} " not in ids


async def test_a_closed_one_tells_who_waits() -> None:
    async def use(calls: Calls) -> None:
        waiting = asyncio.create_task(calls.ask("PING"))
        await eventually(lambda: heard)
        calls.close()
        with pytest.raises(RedisConnectionError, match="closed"):
            await waiting

    heard: list[bytes] = []

    def hear(data: bytes) -> bytes:
        heard.append(data)
        return b""

    await against(Fake(hear), use)
