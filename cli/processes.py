"""Which processes of this host carry the tokens, and what they use: from the registry and from /proc."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import redis.asyncio as redis
from redis.exceptions import RedisError

from headrace.broker import embedded
from headrace.broker.errors import BrokerDown
from headrace.broker.settings import Settings
from headrace.cli import options

_HAS_PROC = Path("/proc/self/stat").exists()


class Process(TypedDict):
    """One process of the path; one that is two things at once (all in one process) is listed as both."""

    role: Literal["broker", "pod", "replica"]
    pid: int


class Usage(NamedTuple):
    """What a process has used since its start, and its memory now."""

    cpu_s: float
    rss_bytes: int


async def processes(settings: Settings) -> list[Process]:
    """Pods, replicas and the embedded broker on this host, as the registry knows them; raises BrokerDown."""
    found: list[Process] = []
    if settings.redis.url is None:
        found.append({"role": "broker", "pid": await _embedded_pid(settings)})
    broker, host = options.broker_of(settings, "ops"), socket.gethostname()
    try:
        for row in (await broker.listing("pods")).values():
            if row.get("host") == host:
                found.append({"role": "pod", "pid": int(row["pid"])})
        for row in (await broker.listing("replicas")).values():
            if row.get("host") == host:
                found.append({"role": "replica", "pid": int(row["pid"])})
    finally:
        await broker.close()
    return found


def usage(pids: Iterable[int]) -> dict[int, Usage]:
    """What each of these processes uses; one that is gone, or everything where there is no /proc, is left out."""
    used = {pid: _usage(pid) for pid in set(pids)} if _HAS_PROC else {}
    return {pid: one for pid, one in used.items() if one is not None}


def _usage(pid: int) -> Usage | None:
    """Fields 14, 15 and 24 of proc(5)'s stat: user and system time in ticks, resident pages."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the second field is the program's name in brackets, which may hold anything
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


async def _embedded_pid(settings: Settings) -> int:
    async with redis.Redis.from_url(embedded.url(settings.data_dir, "ops"), protocol=2) as client:
        try:
            return int((await client.info("server"))["process_id"])
        except (RedisError, OSError) as error:
            raise BrokerDown from error
