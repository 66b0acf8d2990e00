"""What needs a Redis connection of its own: a replica's ordered writes to a shard, and subscriptions."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import redis.asyncio as redis
from redis.exceptions import ResponseError

from headrace.broker import keys, scripts
from headrace.broker.connection import Command, Pinned
from headrace.broker.errors import BrokerDown
from headrace.broker.hints import encode_hint
from headrace.broker.protocol import Append, Exchange, Hint, Settle, Written
from headrace.broker.tasks import cancel_all

log = logging.getLogger(__name__)


class RedisLane:
    """See `protocol.Lane`."""

    def __init__(self, pool: redis.ConnectionPool, shard: int) -> None:
        self._pinned = Pinned(pool)
        self._shard = shard
        self._settle_sha = ""

    async def exchange(self, hints: Sequence[Hint], appends: Sequence[Append], settles: Sequence[Settle]) -> Exchange:
        if settles and not self._settle_sha:
            [loaded] = await self._ask([("SCRIPT", "LOAD", scripts.source("settle"))])
            self._settle_sha = loaded.decode()
        commands = [self._publish(hint) for hint in hints]
        commands += [self._append(append) for append in appends]
        commands += [self._settle(settle) for settle in settles]
        answers = await self._ask(commands)
        heard, added = answers[: len(hints)], answers[len(hints) : len(hints) + len(appends)]
        settled = answers[len(hints) + len(appends) :]
        return Exchange(
            [_appended(answer) for answer in added],
            [cast(Written, answer.decode()) for answer in settled],
            [hint.pod for hint, count in zip(hints, heard, strict=True) if count == 0],
        )

    def _publish(self, hint: Hint) -> Command:
        return ("SPUBLISH", keys.key("hints", self._shard, hint.pod), encode_hint(hint.entries))

    def _append(self, append: Append) -> Command:
        job_id, entry_id, data = append
        return ("XADD", keys.key("log", self._shard, job_id), "NOMKSTREAM", entry_id, "e", data)

    def _settle(self, settle: Settle) -> Command:
        return ("EVALSHA", self._settle_sha, 1, keys.base(self._shard), *settle)

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        """All answers, in which the only error is that of a fenced append; any other leaves the state unknown."""
        answers = await self._pinned.ask(commands)
        for answer in answers:
            if isinstance(answer, ResponseError) and not _is_fenced(answer):
                self._settle_sha = ""  # a server that was started again has no scripts
                await self._pinned.close()
                raise BrokerDown(f"the broker refuses to write: {answer}")
        return answers

    async def close(self) -> None:
        await self._pinned.close()


def _is_fenced(answer: ResponseError) -> bool:
    return "equal or smaller" in str(answer)


def _appended(answer: Any) -> Written:
    if isinstance(answer, ResponseError):
        return "stale"
    return "ok" if answer is not None else "gone"


class RedisListener:
    """A subscription to sharded channels on a connection of its own, for as long as it is not closed."""

    def __init__(
        self,
        pool: redis.ConnectionPool,
        channels: list[str],
        on_message: Callable[[bytes, bytes], None],
        on_connect: Callable[[], None],
    ) -> None:
        self._pinned = Pinned(pool)
        self._channels = channels
        self._on_message = on_message
        self._on_connect = on_connect
        self._task = asyncio.create_task(self._run(), name="listener")

    async def _run(self) -> None:
        delay_s = 0.05
        while True:
            try:
                await self._subscribe()
                delay_s = 0.05
                self._on_connect()
                await self._receive()
            except BrokerDown as error:
                log.warning(
                    "subscription lost, trying again in %.2f s: %s", delay_s, error, extra={"event": "listener_down"}
                )
                await asyncio.sleep(delay_s)
                delay_s = min(1.0, delay_s * 2)

    async def _subscribe(self) -> None:
        answers = await self._pinned.ask([("SSUBSCRIBE", channel) for channel in self._channels])
        refusal = next((answer for answer in answers if isinstance(answer, ResponseError)), None)
        if refusal is not None:
            await self._pinned.close()
            raise BrokerDown(f"the broker refuses a subscription: {refusal}")

    async def _receive(self) -> None:
        while True:
            answer = await self._pinned.receive(math.inf)
            if isinstance(answer, list) and answer[0] == b"smessage":
                self._hear(answer[1], answer[2])

    def _hear(self, channel: bytes, message: bytes) -> None:
        try:
            self._on_message(channel, message)
        except Exception:  # the edge of a loop: one message that cannot be read must not deafen a process
            log.exception("a message on %r cannot be read", channel, extra={"event": "message_unread"})

    async def close(self) -> None:
        await cancel_all([self._task])
        await self._pinned.close()
