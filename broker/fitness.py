"""Is a server fit to hold the logs? Asked once, when a process opens its broker; a refusal says why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace.broker.errors import ConfigError


class Safe(NamedTuple):
    """The oldest release of a series in which the known holes are mended."""

    version: tuple[int, int, int]
    holes: str
    """What older ones of the series have."""


_TLS_REMOTE = "CVE-2026-81934 (whoever reaches its TLS port may run code on it)"
_SCRIPTS = "CVE-2025-49844 (scripts run code outside of their sandbox)"
_KILL = "CVE-2026-56684 and CVE-2026-63639 (clients may run code on it, or end it)"
_ABORT = "CVE-2026-27623 (whoever reaches its port ends it)"

SAFE: dict[str, tuple[Safe, ...]] = {
    "redis": tuple(
        Safe(version, f"{_TLS_REMOTE}, {_SCRIPTS}")
        for version in ((7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 4, 6), (8, 6, 6), (8, 8, 2), (8, 10, 1))
    ),
    "valkey": (
        Safe((8, 0, 10), f"{_KILL}, {_SCRIPTS}"),
        Safe((8, 1, 9), f"{_KILL}, {_SCRIPTS}"),
        Safe((9, 0, 5), f"{_KILL}, {_ABORT}"),
        Safe((9, 1, 1), _KILL),
    ),
}
"""By server, oldest series first; a series that is not here and not newer than all has no release without holes.

Sources: the servers' release notes, and the records of these CVEs; looked up in November 2026.
"""


def check_mode(*, is_cluster: bool, is_expected: bool) -> None:
    """Raise ConfigError if the server is one of a cluster and the configuration says no, or the other way round."""
    if is_cluster and not is_expected:
        raise ConfigError("redis.cluster: False, but the server is one of a Redis Cluster; set it to true")
    if is_expected and not is_cluster:
        raise ConfigError("redis.cluster: True, but the server is not one of a Redis Cluster; set it to false")


def check_policy(memory: Mapping[str, Any]) -> None:
    """Raise ConfigError if the server would evict logs; `memory` is that part of INFO."""
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"redis: maxmemory-policy is {policy!r}: it would evict logs that are being read; set it to noeviction"
        )


def check_version(server: Mapping[str, Any]) -> None:
    """Raise ConfigError if the server has holes that are known; `server` is that part of INFO."""
    name = "valkey" if "valkey_version" in server else "redis"
    text = str(server[f"{name}_version"])
    version = tuple(int(part) for part in text.split("-")[0].split(".")[:3])
    known = SAFE[name]
    own = next((safe for safe in known if safe.version[:2] == version[:2]), None)
    if version >= (own or known[-1]).version:
        return
    why = f"has {own.holes}" if own else "is of a series whose holes are not mended any more"
    wanted = ", ".join(".".join(map(str, safe.version)) for safe in known)
    raise ConfigError(
        f"redis: {name} {text} {why}; run {wanted} or newer, or set redis.check_version to false if its provider "
        "has mended it without giving it a new number"
    )
