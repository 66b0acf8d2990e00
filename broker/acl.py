"""Who may do what on the server: one table of users, from which all ACL rules of all deployments are made.

A user is what a kind of process logs in as. It may call our functions and bring none (`EVAL`, `SCRIPT` and
`FUNCTION LOAD` are nobody's but the loader's and the operator's), so that its password runs no other code; each command
in a function is checked against its rights too. It sees the kinds of keys that are named for it, in every shard.
https://valkey.io/topics/acl/

`tests/broker/test_acl.py` reads the Lua files and says which line to change here when a verb needs more, or less.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from headrace.broker import keys

_SHARD = "hr:{????}:"
"""The prefix of any shard, as a pattern; a function is told it as its one key."""

_COMMON = "cluster|slots fcall info ping time "
"""What it takes to connect, and to call a function that asks for the time."""

_ENQUEUE = (
    "del exists get hdel hget hgetall hincrby hmget hset info lpop lrem pexpire pttl sadd set spublish srem "
    "xadd xlen xrevrange zadd zcount zrem "
)
"""What it takes to enter a job in a queue, to end one, and to tell who reads it."""


class User(NamedTuple):
    """One user: the verbs it calls, and what it may do in them and beside them."""

    meaning: str
    verbs: str = ""
    commands: str = ""
    """All of them, in functions and beside these; `x|y` is the subcommand `y`."""
    writes: str = ""
    """Kinds of keys that it reads and writes."""
    reads: str = ""
    """Kinds of keys that it only reads."""
    channels: str = ""
    """Kinds of channels that it subscribes to or publishes to."""
    notes: str = ""
    """Kinds of streams that it adds to, and can neither read nor delete; `XADD` can trim, which no rule forbids."""
    administers: str = ""
    """Commands for the server itself, which whoever provides a managed one keeps."""
    is_for_people: bool = False
    """It may look at all that is ours."""


USERS: dict[str, User] = {
    "gateway": User(
        "a pod: admits jobs, reads and ends them",
        verbs="admit cancel dead forget present reap stats status unwatch watch",
        commands=_COMMON + _ENQUEUE + "expire lrange scard smembers ssubscribe xrange xread zcard zrange zrangebyscore "
        "zrank zremrangebyscore zrevrange zscore",
        writes="ages arrived counter dead deadlines fair held idle job leases load log models news overrun pod pods "
        "poison queue readers reaped secret slots spent unread usage",
        reads="decided decisions drain keys model prefix replica replicas unplaced",
        channels="hints wake",
        notes="audit",
    ),
    "worker": User(
        "a replica: claims jobs, writes their logs and ends them",
        verbs="claim present reap release settle tick",
        commands=_COMMON
        + _ENQUEUE
        + "hlen hrandfield rpush scard smembers ssubscribe xrange zcard zrange zrangebyscore "
        "zremrangebyscore",
        writes="ages arrived counter dead deadlines drain fair held idle job leases load log model models news overrun "
        "poison prefix queue readers reaped replica replicas slots spent unread usage",
        reads="unplaced",
        channels="hints wake",
    ),
    "scaler": User(
        "who decides how many replicas there are: reads the queues, says what is wanted, notes its decisions",
        verbs="present stats",
        commands=_COMMON
        + "del exists expire get hget hgetall hincrby hmget hset lindex lpush lrem ltrim pexpire pttl scard set zadd "
        "zcard zrange zrem zremrangebyscore",
        writes="decided decisions idle model unplaced",
        reads="ages arrived held load pod pods queue replica replicas",
    ),
    "ops": User(
        "an operator, and `headrace status` and `headrace jobs`",
        verbs="admit dead expire stats status",
        commands=_COMMON + _ENQUEUE + "expire lrange scard xrange zcard zrange zrank zrevrange zscore "
        "dbsize function|list latency|latest llen scan slowlog|get smembers ttl type xinfo|stream xread "
        "zrangebyscore zremrangebyscore",
        administers="acl bgrewriteaof client cluster command config failover function latency memory object replicaof "
        "role slowlog wait",
        writes="ages arrived counter dead deadlines fair held idle job leases load log models news overrun queue "
        "keys poison readers slots spent unplaced unread usage",
        channels="hints wake",
        notes="audit",
        is_for_people=True,
    ),
    "loader": User(
        "`headrace redis-functions`: brings the functions of a version",
        commands="cluster|slots fcall function|delete function|list function|load info ping",
    ),
    "replica": User("a server that copies another", commands="ping psync replconf"),
}


def rules(user: str, *, is_managed: bool = False) -> list[str]:
    """What a user may do, as words of `ACL SETUSER`, without passwords.

    `is_managed` is for a provider's server, which refuses users that administer it, and is not known to take what came
    with Redis 7.0: what may be read or added to there may be written.
    """
    rights = USERS[user]
    commands = {*rights.commands.split(), *("" if is_managed else rights.administers).split()}
    words = ["resetkeys", "resetchannels", "-@all", *(f"+{command}" for command in sorted(commands))]
    if "fcall" in commands:
        words.append(f"~{_SHARD}")
    words += [f"~{_pattern(kind)}" for kind in rights.writes.split()]
    read = "~" if is_managed else "%R~"
    words += [f"{read}hr:*"] if rights.is_for_people else [f"{read}{_pattern(kind)}" for kind in rights.reads.split()]
    words += [f"&{_pattern(kind)}" for kind in rights.channels.split()]
    for kind in rights.notes.split():
        words += [f"~{_pattern(kind)}"] if is_managed else [f"(+expire +xadd ~{_pattern(kind)})"]
    return words


def _pattern(kind: str) -> str:
    """The names of this kind in every shard; an id stands after a colon."""
    infix = keys.KEYS[kind].infix
    return f"{_SHARD}{infix}{'*' if infix.endswith(':') else ''}"


def lines(passwords: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """An ACL file: nobody without a password, and each user with the hashes of those that it is given."""
    yield "user default off"
    for user, known in passwords.items():
        yield " ".join(["user", user, "on", *map(hashed, known), *rules(user)])


def hashed(password: str) -> str:
    """How a server stores a password, and takes it: `#` and its SHA-256."""
    return f"#{hashlib.sha256(password.encode()).hexdigest()}"


def new_password() -> str:
    """192 random bits, in letters that need no quoting in a URL, a shell or YAML."""
    return secrets.token_hex(24)
