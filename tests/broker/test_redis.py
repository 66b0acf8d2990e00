"""What only a server can show: every key expires, no script leaves its shard, and an unfit server is refused."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
import redis

from bench.proxy import Proxy
from headrace.broker import fitness, keys, redis_lane, scripts
from headrace.broker.api_keys import KeySettings, StoredKey
from headrace.broker.errors import BrokerDown, BrokerFull, ConfigError, QueueFull
from headrace.broker.ledger import AuditEntry
from headrace.broker.limits import Allowance, Limits
from headrace.broker.messages import ScaleDecision
from headrace.broker.protocol import Append, Broker
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker.steps import (
    STEP,
    admit,
    append,
    claim,
    finish,
    last_id,
    reap,
    serve,
    settle,
    state_of,
    tick,
    unknown_id,
)
from tests.support import an_admission, eventually
from tests.users import Server


def connect(url: str, **queue: float) -> RedisBroker:
    return RedisBroker(url, RedisSettings(), QueueSettings(**queue))  # type: ignore[arg-type]


@pytest.fixture
async def broker(redis_server: Server, redis_client: redis.Redis) -> AsyncIterator[RedisBroker]:
    broker = connect(redis_server.url)
    await broker.open()
    await serve(broker)
    yield broker
    await broker.close()


async def test_what_is_left_of_a_forgotten_job_is_there_for_ten_seconds(
    broker: RedisBroker, redis_client: redis.Redis
) -> None:
    running = await admit(broker, is_kept=True)
    await claim(broker)
    await broker.forget(running)
    await settle(broker, running, 1, "1-0", "cancelled")
    waiting, ended = await admit(broker, is_kept=True), await finish(broker)
    for job_id in (waiting, ended):
        await broker.forget(job_id)
    for job_id in (running, waiting, ended):
        for kind in ("job", "log"):
            assert 9_000 < redis_client.pttl(keys.key(kind, 0, job_id)) <= 10_000


async def every_verb(broker: Broker) -> None:
    """A workload after which a key of every kind is there."""
    await broker.forget(await finish(broker))
    await broker.present("replicas", "r", "m", {"pid": 1})
    await broker.present("pods", "p", "", {"pid": 2})
    await broker.claim(0, "r", "m", 1)
    cancelled = await admit(broker, band="batch", pod="p", grace_ms=0)
    await broker.cancel(cancelled, "test")
    await finish(broker)
    released = await admit(broker)
    await claim(broker)
    await append(broker, released, "1-1")
    await broker.release("r", released, 1, "1-1")
    await claim(broker)
    await broker.watch("p", [released, cancelled, unknown_id()])
    await tick(broker, renew=True, list_held=True)
    await broker.cancel(released, "test")
    left = await admit(broker, band="interactive", pod="p", grace_ms=1000)
    await broker.unwatch("p", {left: None, cancelled: None})
    await broker.claim(0, "r", "other", 1)
    await broker.status(left)
    await broker.stats("m")
    await reap(broker)
    await broker.absent("pods", "nobody", "")
    await broker.secret(b"secret")
    await broker.note_decision("m", ScaleDecision(1, 1, 2, "up", "backlog"))
    await claim(broker)  # what was left
    for number in range(2):  # one is expired, one stays
        hung = await admit(broker, band="interactive", digest="d" * 32 if number else "")
        for attempt in range(1, 4):
            await claim(broker)
            await broker.release("r", hung, attempt, f"{attempt}-0", is_death=True)
    await broker.expire(hung)
    await broker.dead_letters(0, 10)
    await admit(broker, prefix=b"8 bytes!")
    await claim(broker)
    limits = Limits(requests_per_minute=9, max_jobs=9)
    await admit(broker, allowance=Allowance("key", limits, limits))
    await broker.ledger.note(AuditEntry("somebody", "did", "something"))
    await broker.note_unplaced("other", "no node has 4 GPUs")


def text_of(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer


def infix_of(name: str) -> str:
    """The kind of a key: what stands after the tag, and what its id begins with left out."""
    match = re.fullmatch(r"hr:\{0000\}:([a-z]+:?).*", name)
    assert match, name
    return match[1]


async def test_every_key_has_an_expiry_but_that_of_api_keys(broker: RedisBroker, redis_client: redis.Redis) -> None:
    await every_verb(broker)
    names = [name.decode() for name in redis_client.scan_iter()]
    assert [name for name in names if redis_client.pttl(name) < 0] == []


async def test_every_key_is_in_the_table_with_its_type(broker: RedisBroker, redis_client: redis.Redis) -> None:
    await every_verb(broker)
    await broker.ledger.put_key(StoredKey(KeySettings("alice", "0" * 64), 0))
    found = {infix_of(name.decode()): text_of(redis_client.type(name)) for name in redis_client.scan_iter()}
    listed = {key.infix: key.type.replace("int", "string") for key in keys.KEYS.values() if key.type != "channel"}
    assert found == listed


async def test_a_job_that_has_ended_is_in_no_list(broker: RedisBroker, redis_client: redis.Redis) -> None:
    done, handed_back, cancelled = [await admit(broker, pod="p", grace_ms=1000) for _ in range(3)]
    await broker.claim(0, "r", "m", 2)
    await settle(broker, done, 1, "1-0")
    await broker.release("r", handed_back, 1, "1-0")
    await settle(broker, handed_back, 1, "1-0")
    await broker.cancel(cancelled, "test")
    await tick(broker, seen=int(redis_client.get(keys.key("counter", 0)) or 0))
    names = {name.decode() for name in redis_client.scan_iter()}
    own = {keys.key(kind, 0, job_id) for kind in ("job", "log", "readers") for job_id in (done, handed_back, cancelled)}
    lasting = [keys.key(kind, 0) for kind in ("counter", "models")]
    lasting += [keys.key(kind, 0, "m") for kind in ("model", "drain", "arrived")]
    assert {name for name in names - own if ":usage:" not in name} == set(lasting)


async def test_a_job_that_waits_is_in_no_list_of_running_ones(broker: RedisBroker, redis_client: redis.Redis) -> None:
    job_id = await admit(broker)
    await claim(broker)
    assert redis_client.exists(keys.key("deadlines", 0)) == 0
    await broker.release("r", job_id, 1, "1-0")
    assert redis_client.exists(keys.key("leases", 0), keys.key("held", 0, "r")) == 0


async def test_shared_keys_outlive_every_job_that_is_in_them(broker: RedisBroker, redis_client: redis.Redis) -> None:
    job_id = await admit(broker, pod="p", grace_ms=1000)
    until_ms = redis_client.pexpiretime(keys.key("job", 0, job_id))
    shared = [keys.key(kind, 0) for kind in ("unread", "deadlines", "models", "counter")]
    shared += [keys.key(kind, 0, "m:default") for kind in ("queue", "ages", "fair")] + [keys.key("load", 0, "m")]
    assert [name for name in shared if redis_client.pexpiretime(name) < until_ms] == []


async def test_a_prompt_is_kept_only_while_it_is_needed(broker: RedisBroker, redis_client: redis.Redis) -> None:
    def has_prompt(job_id: str) -> bool:
        return bool(redis_client.hexists(keys.key("job", 0, job_id), "spec"))

    assert not has_prompt(await finish(broker))
    job_id = await admit(broker)
    for attempt in range(1, 4):
        await claim(broker)
        await broker.release("r", job_id, attempt, f"{attempt}-0", is_death=True)
    assert has_prompt(job_id)
    await broker.expire(job_id)
    assert not has_prompt(job_id)


async def test_the_drain_rate_is_of_the_last_half_minute_and_forgotten_after_five(
    redis_server: Server, redis_client: redis.Redis
) -> None:
    broker, drain = connect(redis_server.url, max_waiting_jobs=40), keys.key("drain", 0, "m")

    async def retry_after_s() -> int | None:
        with pytest.raises(QueueFull) as caught:
            await broker.admit(an_admission())
        return caught.value.retry_after_s

    for _ in range(30):
        await admit(broker)
        await claim(broker)
    for _ in range(40):
        await admit(broker)
    assert await retry_after_s() in (4, 5)
    redis_client.hincrby(drain, "at_ms", -30_000)
    assert await retry_after_s() in (11, 12)
    assert 290_000 < redis_client.pttl(drain) <= 300_000
    redis_client.delete(drain)
    assert await retry_after_s() == 5
    await broker.close()


async def test_no_script_touches_another_shard(redis_server: Server, redis_client: redis.Redis) -> None:
    narrow = ["on", ">secret", "~hr:{0000}:*", "&hr:{0000}:*", "+@all"]
    redis_client.execute_command("ACL", "SETUSER", "narrow", *narrow)  # type: ignore[no-untyped-call]
    broker = connect(redis_server.url_of("narrow"))
    try:
        await serve(broker)
        await every_verb(broker)
        with pytest.raises(BrokerDown, match="refuses our user"):
            await broker.status("0001" + unknown_id()[4:])
    finally:
        await broker.close()
        redis_client.acl_deluser("narrow")


def test_every_function_says_what_it_is() -> None:
    for verb in scripts.VERBS:
        assert scripts.source(verb).startswith("#!lua")
        assert f"-- {verb}: " in scripts.source(verb)


async def test_a_server_that_would_evict_logs_is_refused(broker: RedisBroker, redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory-policy", "volatile-lru")
    with pytest.raises(ConfigError, match="maxmemory-policy is 'volatile-lru'"):
        await broker.open()


async def test_a_server_that_is_too_old_is_refused(broker: RedisBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    for server in fitness.SAFE:
        monkeypatch.setitem(fitness.SAFE, server, (fitness.Safe((99, 0, 1), "a hole"),))
    with pytest.raises(ConfigError, match=r"; run 99\.0\.1 or newer, or set redis\.check_version to false"):
        await broker.open()
    monkeypatch.setattr(broker, "_must_be_safe", False)  # redis.check_version: false
    await broker.open()


async def test_a_full_server_admits_nothing_and_lets_jobs_end(broker: RedisBroker, redis_client: redis.Redis) -> None:
    job_id = await admit(broker)
    await claim(broker)
    redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(BrokerFull):
            await broker.admit(an_admission())
        with pytest.raises(BrokerDown):
            await append(broker, job_id, "1-1")
        assert await settle(broker, job_id, 1, "1-0") == "ok"
        await broker.present("replicas", "r", "m", {"state": "ready"})  # else its waiting jobs would end, too
        assert await broker.ping() > 1
    finally:
        redis_client.config_set("maxmemory", 0)


async def test_a_break_between_two_batches_is_told_and_not_passed_over(
    broker: RedisBroker, redis_client: redis.Redis
) -> None:
    """The server may be another one by now, or have lost the log's end: its writer must ask first."""
    job_id = await admit(broker)
    await claim(broker)
    lane = broker.lane(0)
    assert (await lane.exchange([], [Append(job_id, "1-1", STEP)], [])).appends == ["ok"]
    [mine] = [each for each in redis_client.client_list() if each["cmd"] == "xadd"]
    redis_client.client_kill_filter(_id=mine["id"])
    await eventually(lambda: lane._pinned._transport is not None and lane._pinned._transport.is_closing())
    with pytest.raises(BrokerDown):
        await lane.exchange([], [Append(job_id, "1-3", STEP)], [])
    assert await last_id(broker, job_id) == "1-1"
    assert (await lane.exchange([], [Append(job_id, "1-2", STEP)], [])).appends == ["ok"]
    await lane.close()


async def test_without_a_server_every_verb_says_that_the_broker_is_down() -> None:
    broker = connect("unix:///nowhere/broker.sock")
    with pytest.raises(BrokerDown):
        await broker.open()
    with pytest.raises(BrokerDown):
        await broker.admit(an_admission())
    with pytest.raises(BrokerDown):
        await append(broker, unknown_id(), "1-1")
    await broker.close()


async def test_a_tick_renews_an_overdue_lease_that_is_still_there(broker: RedisBroker, redis_server: Server) -> None:
    hasty = connect(redis_server.url, lease_s=0.0)
    await admit(broker)
    await claim(hasty)
    assert (await tick(broker, renew=True)).held == 1
    assert (await reap(broker)).leases == 0
    await hasty.close()


async def test_a_replica_learns_of_news_after_the_counter_began_anew(
    broker: RedisBroker, redis_client: redis.Redis
) -> None:
    for _ in range(3):
        await finish(broker)
    redis_client.delete(keys.key("counter", 0))
    job_id = await admit(broker)
    await claim(broker)
    await broker.cancel(job_id, "test")
    assert [news.cancel for news in (await tick(broker, seen=3)).news] == ["test"]


async def test_a_job_that_expired_while_it_ran_is_forgotten_by_its_replica(
    broker: RedisBroker, redis_server: Server
) -> None:
    kept = await admit(broker)
    await claim(broker)
    fleeting = connect(redis_server.url, queue_timeout_s=0.3, max_run_s=0.0, log_ttl_s=0.0)
    expiring = await admit(fleeting)
    await claim(fleeting)

    async def is_expired() -> bool:
        return await state_of(broker, expiring) == "unknown"

    await eventually(is_expired)
    assert sorted((await tick(broker, list_held=True)).jobs) == sorted([kept, expiring])
    assert await broker.release("r", expiring, None, None) == "gone"
    assert (await tick(broker, list_held=True)).jobs == [kept]
    await fleeting.close()


async def test_an_attempt_after_a_restart_has_a_number_that_no_lost_one_can_have_had(
    broker: RedisBroker, redis_client: redis.Redis
) -> None:
    """An attempt may be lost that readers have seen: under its number nothing else may come."""
    job_id = await admit(broker)
    redis_client.hset(keys.key("job", 0, job_id), "history", "another")
    [after_loss] = await broker.claim(0, "r", "m", 1)
    assert after_loss.attempt > 1
    await broker.release("r", job_id, after_loss.attempt, f"{after_loss.attempt}-0")
    [again] = await broker.claim(0, "r", "m", 1)
    assert again.attempt == after_loss.attempt + 1


async def test_an_end_without_an_attempt_has_such_a_number_too(broker: RedisBroker, redis_client: redis.Redis) -> None:
    job_id = await admit(broker)
    redis_client.hset(keys.key("job", 0, job_id), "history", "another")
    await broker.cancel(job_id, "test")
    status = await broker.status(job_id)
    assert status is not None
    assert keys.position(status.last)[0] > 1


async def test_a_subscription_whose_host_is_gone_is_made_again(
    redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_lane, "PING_S", 0.05)
    server = redis_server.socket
    proxy = Proxy(server.with_name("proxy.sock"), server)
    await proxy.start()
    broker, connections = connect(proxy.url.replace("://", "://everyone:secret@")), []
    listener = broker.listen_hints("p", lambda _: None, lambda: connections.append("new"))
    await eventually(lambda: len(connections) == 1)
    await asyncio.sleep(0.3)
    assert len(connections) == 1
    proxy.silence()
    await eventually(lambda: len(connections) == 2)
    await listener.close()
    await broker.close()
    await proxy.close()


async def test_what_is_kept_for_a_promised_time_is_kept_no_longer(
    broker: RedisBroker, redis_client: redis.Redis
) -> None:
    job_id = await admit(broker)
    await claim(broker)
    await settle(broker, job_id, 1, "1-0")
    days = [redis_client.ttl(name) / 86_400 for name in redis_client.scan_iter(match="hr:{0000}:usage:*")]
    assert len(days) == 1
    assert 34 < days[0] <= 35
