"""The broker on Redis or Valkey: each verb is one script on the shard of its job."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import (
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from headrace.broker import keys, messages, scripts
from headrace.broker.errors import BrokerDown, BrokerFull, ConfigError, NoCapacity, OwnerQueueFull, QueueFull
from headrace.broker.messages import ScaleDecision
from headrace.broker.protocol import (
    MAX_DECISIONS,
    Admission,
    Admitted,
    Claim,
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
from headrace.broker.redis_lane import RedisLane, RedisListener
from headrace.broker.settings import QueueSettings, RedisSettings

SAFE_VERSIONS: dict[str, tuple[tuple[int, ...], ...]] = {
    "redis": ((7, 0, 15), (7, 2, 4)),
    "valkey": ((8, 0, 1),),
}
"""The oldest accepted versions, per server and series; older ones lack scripts with flags or have known holes."""

_REAP_LIMIT = 256
_FULL_RETRY_S = 5
_DOWN_RETRY_S = 1
_SECRET_TTL_S = 30 * 86_400
_DECISIONS_TTL_S = 86_400
_POOL_WAIT_S = 30.0  # a burst of requests waits its turn; each command has a timeout of its own


class RedisBroker:
    """See `protocol.Broker`. `url` is where the server is; all processes of a deployment agree on `shards`."""

    def __init__(self, url: str, settings: RedisSettings, queue: QueueSettings) -> None:
        self.shards = settings.shards
        self._queue = queue
        common: dict[str, Any] = {
            "protocol": 2,
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": settings.timeout_s,
        }
        self._pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=settings.pool_size,
            timeout=_POOL_WAIT_S,
            retry=Retry(ConstantBackoff(0.05), 2),
            **common,
        )
        # the settings of pinned connections; of the pool itself only `reap` takes one
        self._pinned_pool = redis.ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **common)
        # Any: redis-py types each answer as the union of all that any server and protocol could say
        self._redis: Any = redis.Redis(connection_pool=self._pool)
        self._untried: Any = redis.Redis(connection_pool=self._pinned_pool)
        """For what must not be sent a second time after a break, unnoticed."""
        self._scripts: dict[str, AsyncScript] = {
            verb: self._redis.register_script(scripts.source(verb)) for verb in scripts.VERBS
        }

    async def open(self) -> None:
        with _broker_errors():
            info = await self._redis.info("server")
            memory = await self._redis.info("memory")
            for verb in scripts.VERBS:
                await self._redis.script_load(scripts.source(verb))
        _check_server(info, memory)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._pool.disconnect()
        await self._pinned_pool.disconnect()

    async def ping(self) -> float:
        with _broker_errors():
            memory = await self._redis.info("memory")
        limit = int(memory.get("maxmemory", 0))
        return int(memory["used_memory"]) / limit if limit else 0.0

    async def _run(self, verb: str, shard: int, *args: str | bytes | float) -> Any:
        try:
            with _broker_errors():
                return await self._scripts[verb](keys=[keys.base(shard)], args=list(args))
        except BrokerDown as error:
            await self._leave_demoted(error)
            raise

    async def _leave_demoted(self, error: BrokerDown) -> None:
        """A server that takes no writes is a former primary: what leads to it is given up, not used again."""
        if isinstance(error.__cause__, ReadOnlyError):
            await self._pool.disconnect(inuse_connections=False)

    # -- a job's life ---------------------------------------------------------------------------------------------

    async def admit(self, admission: Admission) -> Admitted:
        job, queue = admission.job, self._queue
        timeout_ms = admission.queue_timeout_ms
        answer = await self._run(
            "admit",
            keys.shard_of(job.id),
            job.id,
            messages.encode(job),
            messages.encode(admission.view),
            job.model,
            admission.view.band,
            admission.pod or "",
            admission.grace_ms,
            _ms(queue.reader_lease_s),
            _ms(queue.queue_timeout_s) if timeout_ms is None else timeout_ms,
            _ms(queue.queue_timeout_s + queue.max_run_s + queue.log_ttl_s),
            _ms(queue.log_ttl_s),
            queue.max_deaths,
            *_queueing(admission, queue),
            _ms(queue.max_run_s),
        )
        match answer:
            case [b"no_capacity"]:
                raise NoCapacity
            case [b"queue_full", waiting, retry_after_s]:
                raise QueueFull.of(waiting, retry_after_s)
            case [b"owner_queue_full", waiting, retry_after_s]:
                raise OwnerQueueFull.of(waiting, retry_after_s)
        if answer[0] == b"admitted":
            return Admitted(True, answer[1].decode(), answer[2])
        return Admitted(False, answer[1].decode())

    async def claim(self, shard: int, replica: str, model: str, count: int) -> list[Claim]:
        rows = await self._run("claim", shard, replica, model, count, _ms(self._queue.lease_s))
        return [
            Claim(messages.decode_job(spec), int(attempt), after.decode(), waited, [pod.decode() for pod in pods])
            for _, spec, attempt, after, waited, pods in rows
        ]

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

    async def watch(self, pod: str, job_ids: Sequence[str]) -> list[bool]:
        found: dict[str, bool] = {}
        for shard, ids in _by_shard(job_ids).items():
            states = await self._run("watch", shard, pod, _ms(self._queue.reader_lease_s), *ids)
            found.update(zip(ids, (state == b"ok" for state in states), strict=True))
        return [found[job_id] for job_id in job_ids]

    async def unwatch(self, pod: str, leaving: Mapping[str, int | None]) -> None:
        for shard, ids in _by_shard(list(leaving)).items():
            pairs = [arg for job_id in ids for arg in (job_id, "" if leaving[job_id] is None else leaving[job_id])]
            await self._run("unwatch", shard, pod, *cast(list[str | int], pairs))

    async def reap(self, shard: int) -> Reaped:
        limits = [_REAP_LIMIT, _ms(self._queue.dead_letter_ttl_s)]
        with _broker_errors():
            # a break must be seen: leases that ran out while the broker was away must have time to be renewed
            return Reaped(*await self._scripts["reap"](keys=[keys.base(shard)], args=limits, client=self._untried))

    async def status(self, job_id: str) -> JobStatus | None:
        row = await self._run("status", keys.shard_of(job_id), job_id)
        if not row:
            return None
        view, state, last, attempt, ahead, deaths = row
        return JobStatus(
            messages.decode_view(view),
            state.decode(),
            last.decode(),
            int(attempt),
            ahead if ahead >= 0 else None,
            int(deaths),
        )

    async def dead_letters(self, shard: int, count: int) -> list[DeadLetter]:
        return [_dead_letter(row) for row in await self._run("dead", shard, count, "")]

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        rows = await self._run("dead", keys.shard_of(job_id), 1, job_id)
        return _dead_letter(rows[0]) if rows else None

    async def expire(self, job_id: str) -> bool:
        return bool(await self._run("expire", keys.shard_of(job_id), job_id))

    async def secret(self, offered: bytes) -> bytes:
        key = keys.key("secret", 0)
        with _broker_errors():
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.set(key, offered, nx=True, ex=_SECRET_TTL_S).expire(key, _SECRET_TTL_S).get(key)
                found: bytes = (await pipe.execute())[-1]
        return found

    async def stats(self, model: str) -> ModelStats:
        waiting, oldest, running, tokens = dict.fromkeys(messages.BANDS, 0), 0, 0, 0
        arrived_jobs, arrived_tokens = 0, 0
        for shard in range(self.shards):
            counts, age, held, prompt_tokens, *arrived = await self._run("stats", shard, model)
            arrived_jobs, arrived_tokens = arrived_jobs + arrived[0], arrived_tokens + arrived[1]
            for band, count in zip(messages.BANDS, counts, strict=True):
                waiting[band] += count
            oldest, running, tokens = max(oldest, age), running + held, tokens + prompt_tokens
        return ModelStats(waiting, oldest, running, tokens, arrived_jobs, arrived_tokens)

    # -- the autoscaler -------------------------------------------------------------------------------------------

    async def note_decision(self, model: str, decision: ScaleDecision) -> None:
        kept, counts = keys.key("decisions", 0, model), keys.key("decided", 0, model)
        with _broker_errors():
            newest = await self._redis.lindex(kept, 0)
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hincrby(counts, f"{decision.direction}:{decision.reason}", 1).expire(counts, _DECISIONS_TTL_S)
                if newest is None or decision.is_news_after(messages.decode_decision(newest)):
                    pipe.lpush(kept, messages.encode(decision)).ltrim(kept, 0, MAX_DECISIONS - 1)
                pipe.expire(kept, _DECISIONS_TTL_S)
                await pipe.execute()

    async def decisions(self, model: str, count: int) -> list[ScaleDecision]:
        with _broker_errors():
            rows = await self._redis.lrange(keys.key("decisions", 0, model), 0, count - 1)
        return [messages.decode_decision(row) for row in rows]

    async def decided(self, model: str) -> dict[str, int]:
        with _broker_errors():
            row = await self._redis.hgetall(keys.key("decided", 0, model))
        return {name.decode(): int(times) for name, times in row.items()}

    # -- the log --------------------------------------------------------------------------------------------------

    def lane(self, shard: int) -> RedisLane:
        return RedisLane(self._pinned_pool, shard)

    async def last_id(self, job_id: str) -> Position | None:
        with _broker_errors():
            rows = await self._redis.xrevrange(_log(job_id), count=1)
        return rows[0][0].decode() if rows else None

    async def read(self, job_id: str, first: Position, count: int) -> list[tuple[Position, bytes]]:
        with _broker_errors():
            rows = await self._redis.xrange(_log(job_id), min=first, count=count)
        return [(entry_id.decode(), fields[b"e"]) for entry_id, fields in rows]

    async def read_after(
        self, shard: int, positions: Mapping[str, Position], count: int
    ) -> dict[str, list[tuple[Position, bytes]]]:
        if not positions:
            return {}  # XREAD of nothing is an error
        streams = {_log(job_id): position for job_id, position in positions.items()}
        with _broker_errors():
            answer = await self._redis.xread(streams, count=count)
        return {
            name.decode()[-32:]: [(entry_id.decode(), fields[b"e"]) for entry_id, fields in rows]
            for name, rows in answer
        }

    # -- who is there ---------------------------------------------------------------------------------------------

    def listen_hints(self, pod: str, on_hint: Callable[[bytes], None], on_gap: Callable[[], None]) -> Listener:
        channels = [keys.key("hints", shard, pod) for shard in range(self.shards)]
        return RedisListener(self._pinned_pool, channels, lambda _, message: on_hint(message), on_gap)

    def listen_wakes(self, replica: str, on_wake: Callable[[int], None]) -> Listener:
        channels = [keys.key("wake", shard, replica) for shard in range(self.shards)]

        def wake_all() -> None:
            for shard in range(self.shards):
                on_wake(shard)

        return RedisListener(
            self._pinned_pool, channels, lambda channel, _: on_wake(channels.index(channel.decode())), wake_all
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
        with _broker_errors():
            ids = [found.decode() for found in await self._redis.zrange(keys.key(kind, 0), 0, -1)]
            rows = [await self._redis.hgetall(keys.key(one, 0, each)) for each in ids]
        about = ({name.decode(): value.decode() for name, value in row.items()} for row in rows)
        return {each: row for each, row in zip(ids, about, strict=True) if row}


def _queueing(admission: Admission, queue: QueueSettings) -> Iterator[str | float]:
    """What `admit` is told of the owner, of what the job costs, and of the bounds."""
    share = admission.share
    yield from (admission.view.owner, admission.prompt_tokens, admission.cost_tokens, share.weight, queue.batch_share)
    yield from (queue.max_waiting_jobs, queue.max_waiting_bytes, queue.max_waiting_tokens)
    for bound in (share.max_waiting_jobs, share.max_waiting_bytes, share.max_waiting_tokens):
        yield "" if bound is None else bound


def _log(job_id: str) -> str:
    return keys.key("log", keys.shard_of(job_id), job_id)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


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


@contextlib.contextmanager
def _broker_errors() -> Iterator[None]:
    """Turn what the server or the connection says into errors of ours; a script's own fault is a bug and stays."""
    try:
        yield
    except OutOfMemoryError as error:
        raise BrokerFull(retry_after_s=_FULL_RETRY_S) from error
    except (ReadOnlyError, ClusterDownError, TryAgainError) as error:
        raise BrokerDown(f"the broker cannot do this now: {error}", retry_after_s=_DOWN_RETRY_S) from error
    except ResponseError as error:
        if str(error).startswith(("NOREPLICAS", "MISCONF", "BUSY")):
            raise BrokerDown(f"the broker cannot do this now: {error}", retry_after_s=_DOWN_RETRY_S) from error
        raise
    except (TimeoutError, RedisError, OSError) as error:
        raise BrokerDown(retry_after_s=_DOWN_RETRY_S) from error


def _check_server(info: Mapping[str, Any], memory: Mapping[str, Any]) -> None:
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"redis: maxmemory-policy is {policy!r}: it would evict logs that are being read; set it to noeviction"
        )
    name = "valkey" if "valkey_version" in info else "redis"
    version = tuple(int(part) for part in str(info[f"{name}_version"]).split(".")[:3])
    oldest = SAFE_VERSIONS[name]
    same_series = [safe for safe in oldest if safe[:2] == version[:2]]
    if version < (same_series[0] if same_series else oldest[0]):
        wanted = ", ".join(".".join(map(str, safe)) for safe in oldest)
        raise ConfigError(f"redis: {name} {'.'.join(map(str, version))} is too old; run one of {wanted} or newer")
