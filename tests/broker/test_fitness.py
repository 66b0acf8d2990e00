"""Which servers are refused, and what the refusal says."""

from __future__ import annotations

import pytest

from headrace.broker import fitness
from headrace.broker.errors import ConfigError


def info(version: str) -> dict[str, str]:
    """As a server says it; Valkey also says which Redis it takes after."""
    name, _, number = version.partition(" ")
    return {"redis_version": "7.2.4", f"{name}_version": number}


@pytest.mark.parametrize(
    "version",
    ["redis 7.2.16", "redis 7.4.12", "redis 8.10.1", "redis 8.11.0", "redis 9.0.0", "valkey 8.0.10", "valkey 9.0.6",
     "valkey 9.1.2", "valkey 10.0.0", "valkey 9.2.0-rc1"],
)  # fmt: skip
def test_a_server_without_known_holes_is_taken(version: str) -> None:
    fitness.check_version(info(version))


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("redis 7.2.15", "has CVE-2026-81934 .*whoever reaches its TLS port.*CVE-2025-49844"),
        ("redis 8.2.2", "has CVE-2026-81934"),
        ("redis 7.0.15", "series whose holes are not mended any more"),
        ("redis 8.0.4", "series whose holes are not mended any more"),
        ("redis 6.2.24", "series whose holes are not mended any more"),
        ("valkey 7.2.12", "series whose holes are not mended any more"),
        ("valkey 8.0.9", "has CVE-2026-56684 .*CVE-2025-49844"),
        ("valkey 9.0.2", "has CVE-2026-56684 .*CVE-2026-27623 .*whoever reaches its port ends it"),
        ("valkey 9.1.0", "has CVE-2026-56684"),
    ],
)
def test_a_server_with_known_holes_is_refused_by_their_names(version: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        fitness.check_version(info(version))
    assert version in caught.value.message
    assert "redis.check_version" in caught.value.message


def test_each_series_stands_once_oldest_first() -> None:
    for known in fitness.SAFE.values():
        series = [safe.version[:2] for safe in known]
        assert series == sorted(set(series))
