"""What needs a Redis connection of its own: a replica's ordered writes to a shard, and subscriptions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from redis.exceptions import ResponseError

from headrace.broker import keys, scripts
from headrace.broker.connection import Pinned
from headrace.broker.errors import BrokerDown, BrokerFull
from headrace.broker.hints import encode_hint
from headrace.broker.nodes import Nodes
from headrace.broker.outage import Outage
from headrace.broker.protocol import Append, Exchange, Hint, Settle, Written
from headrace.broker.redis_wire import pack
from headrace.broker.tasks import cancel_all

log = logging.getLogger(__name__)

PING_S = 3.0
"""How often a subscription is asked whether it lives."""


class RedisLane:
    """See `protocol.Lane`."""

    def __init__(self, nodes: Nodes, shard: int) -> None:
        self._pinned = Pinned(nodes, shard)
        self._shard = shard
        self._settle_name = scripts.function("settle")
        self._channels = keys.key("hints", shard).encode()
        self._logs = keys.key("log", shard).encode()

    async def exchange(self, hints: Sequence[Hint], appends: Sequence[Append], settles: Sequence[Settle]) -> Exchange:
        packed = [self._publish(hint) for hint in hints]
        packed += [self._append(append) for append in appends]
        packed += [self._settle(settle) for settle in settles]
        await self._pinned.write(b"".join(packed))
        answers = await self._checked(len(packed))
        heard, added = answers[: len(hints)], answers[len(hints) : len(hints) + len(appends)]
        settled = answers[len(hints) + len(appends) :]
        return Exchange(
            ["stale" if isinstance(said, ResponseError) else "gone" if said is None else "ok" for said in added],
            [cast(Written, answer.decode()) for answer in settled],
            [hint.pod for hint, count in zip(hints, heard, strict=True) if count == 0],
        )

    # Packed by hand (https://redis.io/docs/latest/develop/reference/protocol-spec/): one is written for every token.

    def _publish(self, hint: Hint) -> bytes:
        channel, message = self._channels + hint.pod.encode(), encode_hint(hint.entries)
        return b"*3\r\n$8\r\nSPUBLISH\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(channel), channel, len(message), message)

    def _append(self, append: Append) -> bytes:
        key, id, data, usage = self._logs + append.job_id.encode(), append.entry_id.encode(), append.data, append.usage
        packed = b"*%d\r\n$4\r\nXADD\r\n$%d\r\n%b\r\n$10\r\nNOMKSTREAM\r\n$%d\r\n%b\r\n$1\r\ne\r\n$%d\r\n%b\r\n" % (
            8 if usage else 6, len(key), key, len(id), id, len(data), data
        )  # fmt: skip
        return packed + b"$1\r\nu\r\n$%d\r\n%b\r\n" % (len(usage), usage) if usage else packed

    def _settle(self, settle: Settle) -> bytes:
        return pack(("FCALL", self._settle_name, 1, keys.base(self._shard), *settle))

    async def _checked(self, count: int) -> list[Any]:
        """All answers, in which the only error is that of a fenced append; any other leaves the state unknown."""
        answers = await self._pinned.answers(count)
        for answer in answers:
            if isinstance(answer, ResponseError) and not _is_fenced(answer):
                await self._pinned.leave()
                kind = BrokerFull if str(answer).startswith("OOM") else BrokerDown
                raise kind(f"the broker refuses to write: {answer}")
        return answers

    async def close(self) -> None:
        await self._pinned.close()


def _is_fenced(answer: ResponseError) -> bool:
    return "equal or smaller" in str(answer)


class RedisListener:
    """A subscription to sharded channels on a connection of its own, for as long as it is not closed."""

    def __init__(
        self,
        nodes: Nodes,
        channels: Mapping[str, int],
        on_message: Callable[[int, bytes], None],
        on_connect: Callable[[Sequence[int]], None],
    ) -> None:
        """`channels` are all on one server, each with the shard that is told with its messages."""
        self._shards = {channel.encode(): shard for channel, shard in channels.items()}
        self._pinned = Pinned(nodes, next(iter(channels.values())))
        self._channels = list(channels)
        self._on_message = on_message
        self._on_connect = on_connect
        self._task = asyncio.create_task(self._run(), name="listener")

    async def _run(self) -> None:
        delay_s = 0.05
        outage = Outage(log, "listener_down", "a subscription is lost")
        while True:
            try:
                await self._subscribe()
                delay_s = 0.05
                outage.up()
                self._on_connect(list(self._shards.values()))
                await self._receive()
            except BrokerDown as error:
                outage.down(error)
                await asyncio.sleep(delay_s)
                delay_s = min(1.0, delay_s * 2)

    async def _subscribe(self) -> None:
        answers = await self._pinned.ask([("SSUBSCRIBE", channel) for channel in self._channels])
        refusal = next((answer for answer in answers if isinstance(answer, ResponseError)), None)
        if refusal is not None:
            await self._pinned.leave()
            raise BrokerDown(f"the broker refuses a subscription: {refusal}")

    async def _receive(self) -> None:
        """Until the connection breaks, or says nothing for so long that its other end must be gone."""
        pings = asyncio.create_task(self._ping(), name="listener ping")
        try:
            while (answer := await self._pinned.receive(2 * PING_S)) is not None:
                if isinstance(answer, list) and answer[0] == b"smessage":
                    self._hear(answer[1], answer[2])
                elif isinstance(answer, list) and answer[0] == b"sunsubscribe":
                    break  # in a cluster, the shard has moved to another server
            await self._pinned.leave()
            raise BrokerDown("the subscription is silent, or was ended")
        finally:
            await cancel_all([pings])

    async def _ping(self) -> None:
        """A host that is gone tells nobody; only a question that is not answered does."""
        with contextlib.suppress(BrokerDown):
            while True:
                await asyncio.sleep(PING_S)
                await self._pinned.send([("PING",)])

    def _hear(self, channel: bytes, message: bytes) -> None:
        try:
            self._on_message(self._shards[channel], message)
        except Exception:  # the edge of a loop: one message that cannot be read must not deafen a process
            log.exception("a message on %r cannot be read", channel, extra={"event": "message_unread"})

    async def close(self) -> None:
        await cancel_all([self._task])
        await self._pinned.close()


class Listeners:
    """Several subscriptions as one."""

    def __init__(self, listeners: Sequence[RedisListener]) -> None:
        self._listeners = listeners

    async def close(self) -> None:
        for listener in self._listeners:
            await listener.close()
