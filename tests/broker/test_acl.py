"""The table of users against the Lua files and a real server: what each needs it has, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from headrace.broker import acl, keys, scripts
from headrace.broker.acl import USERS, User
from headrace.broker.errors import BrokerDown
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.broker import lua_use
from tests.broker.steps import claim
from tests.support import an_admission
from tests.users import SECRET, Server

DIRECT: dict[str, tuple[str, str]] = {
    "gateway": (
        "cluster|slots expire fcall get hget hgetall hmget info lrange ping set ssubscribe xadd xrange xread xrevrange "
        "zrange",
        "audit decided decisions hints job keys log pod pods replica replicas secret usage",
    ),
    "worker": (
        "cluster|slots fcall info ping spublish ssubscribe xadd xrange xrevrange",
        "hints log wake",
    ),
    "scaler": (
        "cluster|slots del expire fcall hgetall hincrby info lindex lpush ltrim ping set zrange",
        "decided decisions pod pods replica replicas unplaced",
    ),
    "ops": ("cluster|slots expire fcall hgetall hset info lrange ping xadd xrevrange zrange", "audit keys usage"),
}
"""What each user's processes send beside our functions: commands, kinds of keys."""

NEVER: dict[str, set[str]] = {
    "gateway": set(),
    "worker": {"pod", "pods"},
    "scaler": {"pod", "pods", "replica", "replicas"},  # its `present` is that of the cluster
    "ops": {"pod", "pods", "replica", "replicas", "model", "drain", "prefix"},
}
"""Kinds that a verb names in a branch into which this user's calls never come, or that ops reads as people do."""

ONLY_READ = {"scaler": {"arrived"}}
"""Kinds that a verb writes in such a branch, and that this user reads elsewhere."""

FORBIDDEN = [
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "CONFIG SET dir /", "SHUTDOWN", "ACL LIST", "ACL SETUSER x",
    "SAVE", "BGSAVE", "MODULE LIST", "EVAL x 0", "EVALSHA x 0", "EVAL_RO x 0", "SCRIPT LOAD x", "SCRIPT FLUSH",
    "FUNCTION LOAD x", "FUNCTION FLUSH", "FUNCTION DELETE x", "FUNCTION LIST", "FUNCTION DUMP", "REPLICAOF a 1",
    "SCAN 0", "MONITOR", "CLIENT LIST", "CLIENT KILL TYPE normal", "SUBSCRIBE x", "PSUBSCRIBE *", "PUBLISH x y",
    "SWAPDB 0 1", "MIGRATE a 1 x 0 1", "RESTORE x 0 y", "DUMP x", "RENAME x y", "COPY x y", "SORT x", "OBJECT FREQ x",
    "RANDOMKEY", "DBSIZE", "SLOWLOG GET", "CLUSTER NODES", "SYNC", "PSYNC ? -1", "WAIT 0 0",
]  # fmt: skip
FOREIGN = ["GET other", "SET other 1", "XADD hr:other 1-0 e 1", "HGETALL hr:{00001}:job:x", "SPUBLISH other 1"]


def words_of(user: User) -> set[str]:
    return {*user.commands.split(), *user.administers.split()}


def kinds_of(user: User) -> set[str]:
    return set(f"{user.writes} {user.reads} {user.channels} {user.notes}".split())


def needed(name: str) -> tuple[set[str], set[str]]:
    """Commands and kinds that a user's verbs and processes use."""
    commands, kinds = ({*words.split()} for words in DIRECT[name])
    for verb in USERS[name].verbs.split():
        used = lua_use.of_verb(verb)
        commands |= used.commands
        kinds |= used.kinds - NEVER[name]
    return commands, kinds


@pytest.mark.parametrize("name", DIRECT)
def test_a_user_has_the_rights_that_its_verbs_need(name: str) -> None:
    """A verb that calls or names something new: say so in `USERS` (broker/acl.py), or in `NEVER` why it need not be."""
    commands, kinds = needed(name)
    assert commands - words_of(USERS[name]) == set(), f"commands that {name} needs: add them in broker/acl.py"
    assert kinds - kinds_of(USERS[name]) == set(), f"kinds of keys that {name} needs: add them in broker/acl.py"


@pytest.mark.parametrize("name", [name for name in DIRECT if not USERS[name].is_for_people])
def test_a_user_has_no_right_that_nothing_needs(name: str) -> None:
    commands, kinds = needed(name)
    assert words_of(USERS[name]) - commands == set(), f"commands that {name} does not need: drop them in broker/acl.py"
    assert kinds_of(USERS[name]) - kinds == set(), f"kinds of keys that {name} does not need: drop them there"


def test_every_verb_and_every_kind_of_key_is_somebodys() -> None:
    verbs = {verb for user in USERS.values() for verb in user.verbs.split()}
    assert verbs == set(scripts.VERBS), "a verb that nobody calls, or one that is none: see broker/acl.py"
    kinds = set().union(*map(kinds_of, USERS.values()))
    assert kinds == set(keys.KEYS), "a kind of key that nobody sees, or one that is none: see broker/acl.py"
    for user in USERS.values():
        assert not set(user.writes.split()) & set(user.reads.split())
        channels = {kind for kind in keys.KEYS if keys.KEYS[kind].type == "channel"}
        assert set(user.channels.split()) <= channels
        assert not channels & set(f"{user.writes} {user.reads}".split())


def test_what_is_only_read_is_written_by_no_verb_directly() -> None:
    """As far as the text tells; the suite, which runs with these rights, tells the rest."""
    for name in DIRECT:
        for verb in USERS[name].verbs.split():
            written = lua_use.written_by(verb) - NEVER[name] - ONLY_READ.get(name, set())
            assert written & set(USERS[name].reads.split()) == set(), (name, verb)


@pytest.fixture(params=DIRECT)
def client(request: pytest.FixtureRequest, redis_server: Server, redis_client: redis.Redis) -> Iterator[redis.Redis]:
    """Of each user in turn."""
    with redis.Redis.from_url(redis_server.url_of(request.param), protocol=2) as client:
        yield client


@pytest.mark.parametrize("client", sorted(set(DIRECT) - {"ops"}), indirect=True)  # who may look, and change users
def test_a_stolen_password_gives_nothing_else(client: Any) -> None:
    for command in [*FORBIDDEN, *FOREIGN]:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


def test_not_even_an_operator_wipes_or_runs_scripts(client: Any) -> None:
    for command in (
        "FLUSHALL",
        "FLUSHDB",
        "KEYS *",
        "EVAL x 0",
        "SCRIPT LOAD x",
        "SHUTDOWN",
        "MODULE LIST",
    ):
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.execute_command(*command.split())


async def test_a_pod_cannot_do_what_only_a_replica_does(redis_server: Server, redis_client: redis.Redis) -> None:
    gateway, worker = (
        RedisBroker(redis_server.url_of(user), RedisSettings(), QueueSettings()) for user in ("gateway", "worker")
    )
    await worker.present("replicas", "r", "m", {})
    with pytest.raises(BrokerDown, match="refuses our user: ACL failure"):
        await claim(gateway)
    with pytest.raises(BrokerDown, match="refuses our user"):
        await worker.secret(b"mine")
    await gateway.admit(an_admission())
    assert (await claim(worker)).attempt == 1
    await gateway.close()
    await worker.close()


def test_nobody_who_notes_can_delete_what_was_noted(redis_server: Server, redis_client: Any) -> None:
    audit = keys.key("audit", 0)
    for user in ("gateway", "ops"):
        client: Any
        with redis.Redis.from_url(redis_server.url_of(user), protocol=2) as client:
            client.xadd(audit, {"e": "x"}, maxlen=100)
            for command in (f"DEL {audit}", f"XTRIM {audit} MAXLEN 0", f"SET {audit} x", f"PEXPIRE {audit} 1"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command.split())
    assert redis_client.xlen(audit) == 2


def test_a_pods_password_makes_no_api_key(redis_server: Server, redis_client: redis.Redis) -> None:
    client: Any
    with redis.Redis.from_url(redis_server.url_of("gateway"), protocol=2) as client:
        assert client.hget(keys.key("keys", 0), "x") is None
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.hset(keys.key("keys", 0), "x", "y")


def test_a_function_of_another_cannot_exceed_its_callers_rights(redis_server: Server, redis_client: Any) -> None:
    flush = "#!lua name=evil\nredis.register_function('evil', function() return redis.call('FLUSHALL') end)"
    redis_client.execute_command("FUNCTION LOAD", flush)
    try:
        with (
            redis.Redis.from_url(redis_server.url_of("gateway"), protocol=2) as client,
            pytest.raises(redis.exceptions.ResponseError, match="ACL failure"),
        ):
            client.fcall("evil", 0)
    finally:
        redis_client.execute_command("FUNCTION DELETE", "evil")


def test_an_acl_file_holds_no_password_and_lets_nobody_in_without() -> None:
    lines = list(acl.lines({"gateway": ["swordfish", "old"], "worker": ["swordfish"]}))
    assert lines[0] == "user default off"
    hashes = f"{acl.hashed('swordfish')} {acl.hashed('old')}"
    assert lines[1].startswith(f"user gateway on {hashes} resetkeys resetchannels -@all +")
    assert not any(word in "".join(lines) for word in ("swordfish", ">", "nopass"))


def test_a_providers_server_gets_no_patterns_for_reading_and_no_administrators() -> None:
    assert "%R~hr:{????}:drain:*" in acl.rules("gateway")
    plain = acl.rules("gateway", is_managed=True)
    assert "~hr:{????}:drain:*" in plain and not any(word.startswith("%") for word in plain)
    assert "+config" in acl.rules("ops") and "+config" not in acl.rules("ops", is_managed=True)


def test_the_loader_brings_functions_and_sees_nothing(redis_client: Any, redis_server: Server) -> None:
    redis_client.execute_command("ACL SETUSER", "loader", "on", f">{SECRET}", *acl.rules("loader"))
    try:
        with redis.Redis.from_url(redis_server.url_of("loader"), protocol=2) as client:
            client.function_load(scripts.library(), replace=True)
            for command in ("GET hr:{0000}:secret", "FUNCTION FLUSH", "EVAL x 0", "FLUSHALL"):
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.execute_command(*command.split())
    finally:
        redis_client.acl_deluser("loader")
