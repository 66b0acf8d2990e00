"""The broker on Redis or Valkey: each verb is one function on the shard of its job."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

from redis.exceptions import MovedError, ReadOnlyError

from headrace.broker import fitness, functions, keys, messages, tls
from headrace.broker.admission import answer, arguments
from headrace.broker.errors import BrokerDown, BrokerFull
from headrace.broker.ledger import Ledger
from headrace.broker.messages import Job, ScaleDecision
from headrace.broker.nodes import Node, Nodes
from headrace.broker.protocol import (
    MAX_DECISIONS,
    NOTHING_SAID,
    Admission,
    Admitted,
    Asking,
    Claim,
    Claims,
    DeadLetter,
    JobStatus,
    Listener,
    ModelStats,
    News,
    Position,
    Reaped,
    Tick,
    Written,
)
from headrace.broker.redis_errors import broker_errors
from headrace.broker.redis_lane import Listeners, RedisLane, RedisListener
from headrace.broker.redis_ledger import RedisLedger
from headrace.broker.settings import QueueSettings, RedisSettings

_REAP_LIMIT = 256
_DOWN_RETRY_S = 1
_SECRET_TTL_S = 30 * 86_400
_MOVES = 3
_DECISIONS_TTL_S = 86_400


class RedisBroker:
    """See `protocol.Broker`. `url` is where the server is; all processes of a deployment agree on `shards`."""

    def __init__(self, url: str, settings: RedisSettings, queue: QueueSettings) -> None:
        self.shards = settings.shards
        self.ledger: Ledger = RedisLedger(self._at, settings.shards)
        self._queue = queue
        self._nodes = Nodes(url, settings)
        self._suspicion = partial(tls.suspicion, url=url, settings=settings)
        self._is_cluster = settings.cluster
        self._must_be_safe = settings.check_version

    async def open(self) -> None:
        try:
            with broker_errors():
                mode = (await self._nodes.first.redis.info("cluster")).get("cluster_enabled", 0)
        except BrokerDown as error:
            if said := self._suspicion(error):
                raise BrokerDown(said, retry_after_s=_DOWN_RETRY_S) from error
            raise
        fitness.check_mode(is_cluster=bool(mode), is_expected=self._is_cluster)
        for node in await self._nodes.all():
            with broker_errors():
                info = await node.redis.info("server")
                memory = await node.redis.info("memory")
                await functions.bring(node.redis)
            fitness.check_policy(memory)
            if self._must_be_safe:
                fitness.check_version(info)

    async def close(self) -> None:
        await self._nodes.close()

    async def ping(self) -> float:
        used = 0.0
        for node in await self._nodes.all():
            with broker_errors():
                memory = await node.redis.info("memory")
            limit = int(memory.get("maxmemory", 0))
            used = max(used, int(memory["used_memory"]) / limit if limit else 0.0)
        return used

    @contextlib.asynccontextmanager
    async def _at(self, shard: int) -> AsyncIterator[Node]:
        """The server of a shard; an error says that it may be another one, or not the primary, by now."""
        node = await self._nodes.of(shard)
        try:
            with broker_errors():
                yield node
        except BrokerDown as error:
            if isinstance(error.__cause__, ReadOnlyError):
                await node.let_go()  # it is a former primary
            if not isinstance(error, BrokerFull):
                self._nodes.doubt()
            raise

    async def _run(self, verb: str, shard: int, *args: str | bytes | float) -> Any:
        for _ in range(_MOVES):
            try:
                async with self._at(shard) as node:
                    return await functions.call(node, verb, shard, *args)
            except BrokerDown as error:
                if not isinstance(error.__cause__, MovedError):  # which was not carried out
                    raise
        raise BrokerDown("the shard moves from server to server", retry_after_s=_DOWN_RETRY_S)

    # -- a job's life ---------------------------------------------------------------------------------------------

    async def admit(self, admission: Admission) -> Admitted:
        told = arguments(admission, self._queue)
        return answer(await self._run("admit", keys.shard_of(admission.job.id), *told))

    async def claim(
        self, shard: int, replica: str, models: str | Sequence[str], count: int, asking: Asking = NOTHING_SAID
    ) -> Claims:
        enough = "" if asking.enough_tokens is None else asking.enough_tokens
        names = [models] if isinstance(models, str) else models
        lease_ms = _ms(self._queue.lease_s)
        args = (replica, count, lease_ms, enough, asking.bytes_per_s, asking.dropped, *names)
        again_ms, is_idle, rows = await self._run("claim", shard, *args)
        claims = Claims(_claim(row) for row in rows)
        claims.is_idle = bool(is_idle)
        claims.again_ms = None if again_ms < 0 else again_ms
        return claims

    async def tick(self, shard: int, replica: str, seen: int, *, renew: bool, list_held: bool) -> Tick:
        serial, held, news, jobs = await self._run(
            "tick", shard, replica, seen, _ms(self._queue.lease_s), int(renew), int(list_held)
        )
        return Tick(
            int(serial),
            held,
            [
                News(job.decode(), int(attempt) if attempt else None, cause.decode(), [pod.decode() for pod in pods])
                for job, attempt, cause, pods in news
            ],
            [job.decode() for job in jobs],
        )

    async def release(
        self, replica: str, job_id: str, attempt: int | None, last: Position | None, *, is_death: bool = False
    ) -> Written:
        own = "" if attempt is None else attempt
        args = (replica, job_id, own, last or "", int(is_death), _ms(self._queue.dead_letter_ttl_s))
        return _written(await self._run("release", keys.shard_of(job_id), *args))

    async def cancel(self, job_id: str, cause: str) -> Literal["waiting", "running", "ended", "unknown"]:
        answer = await self._run("cancel", keys.shard_of(job_id), job_id, cause)
        return cast(Literal["waiting", "running", "ended", "unknown"], answer.decode())

    async def watch(self, pod: str, job_ids: Sequence[str], *, is_return: bool = False) -> list[bool]:
        found: dict[str, bool] = {}
        for shard, ids in _by_shard(job_ids).items():
            states = await self._run("watch", shard, pod, _ms(self._queue.reader_lease_s), str(int(is_return)), *ids)
            found.update(zip(ids, (state == b"ok" for state in states), strict=True))
        return [found[job_id] for job_id in job_ids]

    async def unwatch(self, pod: str, leaving: Mapping[str, int | None]) -> None:
        for shard, ids in _by_shard(list(leaving)).items():
            pairs = [arg for job_id in ids for arg in (job_id, "" if leaving[job_id] is None else leaving[job_id])]
            await self._run("unwatch", shard, pod, *cast(list[str | int], pairs))

    async def reap(self, shard: int) -> Reaped:
        queue = self._queue
        times = _ms(queue.dead_letter_ttl_s), _ms(queue.lease_s), _ms(queue.queue_timeout_s + queue.max_run_s)
        return Reaped(*await self._run("reap", shard, _REAP_LIMIT, *times))

    async def status(self, job_id: str, owner: str | None = None) -> JobStatus | None:
        row = await self._run("status", keys.shard_of(job_id), job_id, owner or "")
        if not row:
            return None
        view, state, last, attempt, ahead, deaths, resumes = row
        return JobStatus(
            messages.decode_view(view),
            state.decode(),
            last.decode(),
            int(attempt),
            ahead if ahead >= 0 else None,
            int(deaths),
            int(resumes),
        )

    async def job(self, job_id: str) -> Job | None:
        shard = keys.shard_of(job_id)
        async with self._at(shard) as node:
            spec = await node.redis.hget(keys.key("job", shard, job_id), "spec")
        return messages.decode_job(spec) if spec else None

    async def forget(self, job_id: str) -> bool:
        return bool(await self._run("forget", keys.shard_of(job_id), job_id))

    async def dead_letters(self, shard: int, count: int) -> list[DeadLetter]:
        return [_dead_letter(row) for row in await self._run("dead", shard, count, "")]

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        rows = await self._run("dead", keys.shard_of(job_id), 1, job_id)
        return _dead_letter(rows[0]) if rows else None

    async def expire(self, job_id: str) -> bool:
        return bool(await self._run("expire", keys.shard_of(job_id), job_id))

    async def secret(self, offered: bytes) -> bytes:
        key = keys.key("secret", 0)
        async with self._at(0) as node, node.redis.pipeline(transaction=False) as pipe:
            pipe.set(key, offered, nx=True, ex=_SECRET_TTL_S).expire(key, _SECRET_TTL_S).get(key)
            found: bytes = (await pipe.execute())[-1]
        return found

    async def stats(self, model: str) -> ModelStats:
        waiting, oldest, running, tokens = dict.fromkeys(messages.BANDS, 0), 0, 0, 0
        arrived_jobs, arrived_tokens, starts, why = 0, 0, 0, b""
        for shard in range(self.shards):
            counts, age, held, prompt_tokens, *arrived, why = await self._run("stats", shard, model)
            arrived_jobs, arrived_tokens = arrived_jobs + arrived[0], arrived_tokens + arrived[1]
            for band, count in zip(messages.BANDS, counts, strict=True):
                waiting[band] += count
            oldest, running, tokens = max(oldest, age), running + held, tokens + prompt_tokens
            starts = max(starts, arrived[2])  # every replica comes to every shard
        return ModelStats(waiting, oldest, running, tokens, arrived_jobs, arrived_tokens, starts, why.decode())

    async def note_unplaced(self, model: str, why: str) -> None:
        for shard in range(self.shards):
            key = keys.key("unplaced", shard, model)
            async with self._at(shard) as node:
                await (node.redis.set(key, why, px=_ms(self._queue.lease_s)) if why else node.redis.delete(key))

    # -- the autoscaler -------------------------------------------------------------------------------------------

    async def note_decision(self, model: str, decision: ScaleDecision) -> None:
        kept, counts = keys.key("decisions", 0, model), keys.key("decided", 0, model)
        async with self._at(0) as node:
            newest = await node.redis.lindex(kept, 0)
            async with node.redis.pipeline(transaction=False) as pipe:
                pipe.hincrby(counts, f"{decision.direction}:{decision.reason}", 1).expire(counts, _DECISIONS_TTL_S)
                if newest is None or decision.is_news_after(messages.decode_decision(newest)):
                    pipe.lpush(kept, messages.encode(decision)).ltrim(kept, 0, MAX_DECISIONS - 1)
                pipe.expire(kept, _DECISIONS_TTL_S)
                await pipe.execute()

    async def decisions(self, model: str, count: int) -> list[ScaleDecision]:
        async with self._at(0) as node:
            rows = await node.redis.lrange(keys.key("decisions", 0, model), 0, count - 1)
        return [messages.decode_decision(row) for row in rows]

    async def decided(self, model: str) -> dict[str, int]:
        async with self._at(0) as node:
            row = await node.redis.hgetall(keys.key("decided", 0, model))
        return {name.decode(): int(times) for name, times in row.items()}

    # -- the log --------------------------------------------------------------------------------------------------

    def lane(self, shard: int) -> RedisLane:
        return RedisLane(self._nodes, shard)

    async def last_ids(self, shard: int, job_ids: Sequence[str]) -> list[Position | None]:
        async with self._at(shard) as node:
            asked = [node.calls.ask("XREVRANGE", _log(job_id), "+", "-", "COUNT", 1) for job_id in job_ids]
            answers = await asyncio.gather(*asked)
        return [rows[0][0].decode() if rows else None for rows in answers]

    async def read(self, job_id: str, first: Position, count: int) -> list[tuple[Position, bytes]]:
        async with self._at(keys.shard_of(job_id)) as node:
            return _entries(await node.calls.ask("XRANGE", _log(job_id), first, "+", "COUNT", count))

    async def read_after(
        self, shard: int, positions: Mapping[str, Position], count: int
    ) -> dict[str, list[tuple[Position, bytes]]]:
        if not positions:
            return {}  # XREAD of nothing is an error
        async with self._at(shard) as node:
            streams = (*map(_log, positions), *positions.values())
            answer = await node.calls.ask("XREAD", "COUNT", count, "STREAMS", *streams)
        return {name.decode()[-32:]: _entries(rows) for name, rows in answer or ()}

    # -- who is there ---------------------------------------------------------------------------------------------

    def listen_hints(self, pod: str, on_hint: Callable[[bytes], None], on_gap: Callable[[], None]) -> Listener:
        return self._listen("hints", pod, lambda _, message: on_hint(message), lambda _: on_gap())

    def listen_wakes(self, replica: str, on_wake: Callable[[int], None]) -> Listener:
        def wake(shards: Sequence[int]) -> None:
            for shard in shards:
                on_wake(shard)

        return self._listen("wake", replica, lambda shard, _: on_wake(shard), wake)

    def _listen(
        self,
        kind: Literal["hints", "wake"],
        id: str,
        on_message: Callable[[int, bytes], None],
        on_connect: Callable[[Sequence[int]], None],
    ) -> Listener:
        """One connection for all shards of one server; in a cluster, whose shards may part, one for each."""
        shards = range(self.shards)
        groups = [[shard] for shard in shards] if self._is_cluster else [list(shards)]
        return Listeners(
            [
                RedisListener(
                    self._nodes, {keys.key(kind, shard, id): shard for shard in group}, on_message, on_connect
                )
                for group in groups
            ]
        )

    async def present(
        self, kind: Literal["replicas", "pods", "cluster"], id: str, model: str, about: Mapping[str, str | int]
    ) -> None:
        pairs = [arg for pair in about.items() for arg in pair]
        for shard in range(self.shards):
            await self._run("present", shard, kind, id, model, _ms(self._queue.lease_s), *pairs)

    async def absent(self, kind: Literal["replicas", "pods", "cluster"], id: str, model: str) -> None:
        for shard in range(self.shards):
            await self._run("present", shard, kind, id, model, 0)

    async def listing(self, kind: Literal["replicas", "pods"]) -> dict[str, dict[str, str]]:
        one = "replica" if kind == "replicas" else "pod"
        async with self._at(0) as node:
            ids = [found.decode() for found in await node.redis.zrange(keys.key(kind, 0), 0, -1)]
            async with node.redis.pipeline(transaction=False) as pipe:
                for each in ids:
                    pipe.hgetall(keys.key(one, 0, each))
                rows = await pipe.execute()
        about = ({name.decode(): value.decode() for name, value in row.items()} for row in rows)
        return {each: row for each, row in zip(ids, about, strict=True) if row}


def _log(job_id: str) -> str:
    return keys.key("log", keys.shard_of(job_id), job_id)


def _entries(rows: Sequence[Any]) -> list[tuple[Position, bytes]]:
    """A log's entries out of a server's; `e` is the first field of each, see `redis_lane`."""
    return [(entry_id.decode(), fields[1]) for entry_id, fields in rows]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


def _claim(row: Sequence[Any]) -> Claim:
    _, spec, attempt, after, waited_ms, pods, prefix, fresh_tokens = row
    readers = [pod.decode() for pod in pods]
    return Claim(messages.decode_job(spec), int(attempt), after.decode(), waited_ms, readers, prefix, fresh_tokens)


def _dead_letter(row: Sequence[bytes]) -> DeadLetter:
    spec, view, deaths, died_ms, died_of, died_with = row
    job, seen = messages.decode_job(spec), messages.decode_view(view)
    return DeadLetter(job, seen, int(deaths), int(died_ms), died_of.decode(), died_with.decode())


def _written(answer: bytes) -> Written:
    return cast(Written, answer.decode())


def _by_shard(job_ids: Sequence[str]) -> dict[int, list[str]]:
    shards: dict[int, list[str]] = {}
    for job_id in job_ids:
        shards.setdefault(keys.shard_of(job_id), []).append(job_id)
    return shards
