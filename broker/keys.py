"""Every Redis key of the project, with its type, meaning and expiry; the scripts get the same table.

Names are `hr:{<shard>}:<kind>:<id>`: all keys of a shard share a hash tag, so that a verb is one script on one server.
"""

from __future__ import annotations

import hmac
import re
import secrets
import zlib
from typing import NamedTuple


class Key(NamedTuple):
    """One kind of key: what stands between the shard's prefix and the id, and what the key is for."""

    infix: str
    type: str
    meaning: str
    expiry: str


KEYS: dict[str, Key] = {
    "job": Key(
        "job:",
        "hash",
        "spec, view, place, attempt, deaths, worker, cancel, policy, times, history, usage, key, prefix, passed, "
        "digest, is_kept, is_forgotten, resumes",
        "job",
    ),
    "log": Key("log:", "stream", "the token log; entries <attempt>-<n>, opened with 0-1 Queued", "job"),
    "readers": Key("readers:", "hash", "pod id: end of its reading lease, epoch ms", "job"),
    "queue": Key("queue:", "zset", "<model>:<band>: waiting jobs, as <age><job>, by start tag", "kept"),
    "ages": Key("ages:", "zset", "<model>:<band>: the same members by the time they were enqueued, epoch ms", "kept"),
    "fair": Key(
        "fair:",
        "hash",
        "<model>:<band>: virtual time v; f:<owner>, s:<owner>: its last job's finish, start",
        "queue",
    ),
    "load": Key("load:", "hash", "<model>: jobs, bytes, tokens that wait, of all and as <field>:<owner>", "queue"),
    "drain": Key("drain:", "hash", "<model>: count, of claims, decayed since at_ms", "five minutes"),
    "arrived": Key(
        "arrived:", "hash", "<model>: jobs and prompt tokens that were ever admitted, replicas that have come", "kept"
    ),
    "leases": Key("leases", "zset", "running jobs by lease end, epoch ms", "kept"),
    "unread": Key("unread", "zset", "jobs by the time at which they are cancelled if nobody reads", "kept"),
    "deadlines": Key("deadlines", "zset", "waiting jobs by the time at which they time out", "kept"),
    "overrun": Key(
        "overrun", "zset", "jobs that were claimed, by the time at which they have run for too long", "kept"
    ),
    "reaped": Key(
        "reaped", "hash", "at: when it was last reaped, epoch ms; held: until when nothing is taken back", "kept"
    ),
    "dead": Key("dead", "zset", "dead letters: jobs that lost too many workers, by when, epoch ms", "dead letter"),
    "poison": Key("poison:", "string", "<digest>: a request of an owner's has ended as a dead letter", "an hour"),
    "models": Key("models", "set", "models that may have waiting jobs", "kept"),
    "counter": Key("counter", "int", "start tags and serials of news", "kept"),
    "held": Key("held:", "set", "<replica>: the jobs whose lease it holds", "kept"),
    "news": Key("news:", "zset", "<replica>: its jobs whose mark, readers or lease changed, by serial", "kept"),
    "idle": Key("idle:", "list", "<model>: replicas that found nothing to do", "kept"),
    "prefix": Key(
        "prefix:", "hash", "<model>: by anchor of a prompt's prefix, the replicas that served it, last first", "an hour"
    ),
    "model": Key(
        "model:", "zset", "<model>: who offers capacity for it, by the time until which that holds", "presence"
    ),
    "unplaced": Key("unplaced:", "string", "<model>: why no replica of it can be placed, if none can", "presence"),
    "replica": Key("replica:", "hash", "<replica>: model, state, slots, running, pid, host, context", "presence"),
    "replicas": Key("replicas", "zset", "replica ids by the time until which they are present", "presence"),
    "pod": Key("podinfo:", "hash", "<pod>: pid, host, url", "presence"),
    "pods": Key("pods", "zset", "pod ids by the time until which they are present", "presence"),
    "secret": Key("secret", "string", "what job ids are made of idempotency keys with; on shard 0 only", "secret"),
    "spent": Key(
        "spent:",
        "hash",
        "k:<key>, o:<owner>: requests, tokens: how full its buckets were at ms; tokens of today, of the day",
        "two days",
    ),
    "slots": Key(
        "slots:",
        "zset",
        "j: or s:, then as in spent: its jobs or streams that have not ended, by when they must",
        "kept",
    ),
    "usage": Key("usage:", "hash", "<day>: requests, prompt_tokens, completion_tokens by model and owner", "35 days"),
    "audit": Key("audit", "stream", "who was refused, and who did what; on shard 0 only", "90 days"),
    "keys": Key("keys", "hash", "SHA-256 of an API key: what it may, as msgpack; version; on shard 0 only", "none"),
    "decisions": Key(
        "decisions:", "list", "<model>: the autoscaler's last ones, newest first; on shard 0 only", "a day"
    ),
    "decided": Key("decided:", "hash", "<model>: how often it decided, by <direction>:<reason>; on shard 0", "a day"),
    "hints": Key("pod:", "channel", "<pod>: acknowledged entries of the jobs that it reads", "-"),
    "wake": Key("wake:", "channel", "<replica>: there is work", "-"),
}
"""Expiry: `job` is the job's own life (`queue_timeout_s + max_run_s + log_ttl_s`, then `log_ttl_s` from the end, or
`stored_ttl_s` if it is kept);
`kept` is renewed to at least that with every write; `queue` too, and it is deleted when the queue is empty; `presence`
is a few heartbeats; `dead letter` is `dead_letter_ttl_s` from the last one, as for the job and the log of each;
`secret` is 30 days from its last use; `none` is kept for good."""

JOB_ID = re.compile(r"[0-9a-f]{32}")
POSITION = re.compile(r"(0|[1-9][0-9]{0,9})-(0|[1-9][0-9]{0,9})")


def base(shard: int) -> str:
    """The prefix of all keys of a shard; `{...}` is what Redis Cluster hashes."""
    return f"hr:{{{shard:04x}}}:"


def key(kind: str, shard: int, suffix: str = "") -> str:
    return f"{base(shard)}{KEYS[kind].infix}{suffix}"


def new_job_id(shards: int, session: bytes = b"") -> str:
    """32 hex digits: four name the shard, 28 are random. What has the same session is on one shard."""
    shard = zlib.crc32(session) % shards if session else secrets.randbelow(shards)
    return f"{shard:04x}{secrets.token_hex(14)}"


def at_shard(job_id: str, shard: int) -> str:
    """The same id on another shard."""
    return f"{shard:04x}{job_id[4:]}"


def idempotent_job_id(secret: bytes, owner: str, key: str, shards: int) -> str:
    """The id of the job that an owner's requests with this idempotency key are; who has not the secret cannot tell."""
    digest = hmac.digest(secret, f"{owner}\0{key}".encode(), "sha256")
    return f"{int.from_bytes(digest[14:]) % shards:04x}{digest[:14].hex()}"


def shard_of(job_id: str) -> int:
    return int(job_id[:4], 16)


def is_job_id(text: str, shards: int) -> bool:
    return JOB_ID.fullmatch(text) is not None and shard_of(text) < shards


def position(entry_id: str) -> tuple[int, int]:
    """`<attempt>-<n>` as numbers that compare; raises ValueError for anything else."""
    if POSITION.fullmatch(entry_id) is None:
        raise ValueError(f"not a log position: {entry_id[:40]!r}")
    attempt, _, n = entry_id.partition("-")
    return int(attempt), int(n)


def lua_table() -> str:
    """The same names for the functions: `K.job .. id`, valid for the shard whose prefix `at` was told last."""
    names = ", ".join(f"{kind} = base .. '{entry.infix}'" for kind, entry in KEYS.items())
    return f"local K = {{}}\nlocal function at(base)\n  if K.base ~= base then K = {{ base = base, {names} }} end\nend"
