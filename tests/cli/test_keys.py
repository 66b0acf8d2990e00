"""`headrace keys`, against a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from headrace.broker import keys as redis_keys
from headrace.broker.api_keys import digest
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import BadRequest, NotFound
from headrace.cli import keys
from headrace.cli.durations import seconds


@pytest.fixture
def config(tmp_path: Path, redis_server: EmbeddedServer, redis_client: redis.Redis) -> Path:
    path = tmp_path / "headrace.yaml"
    path.write_text(f"models: [{{name: m, engine: scripted}}]\nredis: {{url: '{redis_server.url}'}}\n", "utf-8")
    return path


def run(config: Path, *args: str) -> Result:
    return CliRunner().invoke(keys.app, [*args, "--config", str(config)])


def said(config: Path, *args: str) -> Any:
    result = run(config, *args, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


def test_a_key_is_shown_once_and_the_broker_has_only_its_hash(config: Path, redis_client: redis.Redis) -> None:
    made = said(config, "create", "alice")
    assert len(made["key"]) >= 3 + 22 and made["id"] == digest(made["key"])[:12]
    [row] = said(config, "list")
    assert (row["id"], row["owner"], row["state"], row["expires"]) == (made["id"], "alice", "active", "never")
    kept = redis_client.hgetall(redis_keys.key("keys", 0))
    assert digest(made["key"]).encode() in kept
    assert made["key"] not in str(kept) and made["key"] not in str(row)
    assert made["key"] != said(config, "create", "alice")["key"]


def test_what_a_key_may_is_said_when_it_is_made(config: Path) -> None:
    options = "--scope use --scope metrics --model m --route /v1 --expires 2d --ceiling batch --weight 2"
    limits = [
        "--limit",
        "requests_per_minute=5",
        "--limit",
        "max-jobs=2",
        "--limit",
        "max_waiting_tokens=9",
        "--owner-limit",
        "tokens_per_day=1000",
    ]
    said(config, "create", "alice", *options.split(), *limits)
    [row] = said(config, "list", "--owner", "alice")
    assert (row["scopes"], row["models"], row["routes"]) == (["use", "metrics"], ["m"], ["/v1"])
    assert (row["ceiling"], row["weight"]) == ("batch", 2.0)
    assert row["limits"] == {"requests_per_minute": 5, "max_jobs": 2} and row["max_waiting_tokens"] == 9
    assert row["owner_limits"] == {"tokens_per_day": 1000}
    assert said(config, "list", "--owner", "bob") == []


def test_a_revoked_key_stays_in_the_list(config: Path) -> None:
    made = said(config, "create", "alice")
    assert run(config, "revoke", made["id"]).stdout == f"{made['id']} revoked\n"
    [row] = said(config, "list")
    assert row["state"] == "revoked"
    assert isinstance(run(config, "rotate", made["id"]).exception, BadRequest)


def test_a_rotated_key_may_the_same_and_the_old_one_goes_on_for_a_while(config: Path) -> None:
    old = said(config, "create", "alice", "--limit", "max_jobs=2")
    new = said(config, "rotate", old["id"], "--overlap", "1h")
    first, second = said(config, "list")
    assert (first["id"], second["id"]) == (old["id"], new["id"]) and old["key"] != new["key"]
    assert (first["state"], second["state"]) == ("active", "active")
    assert first["expires"] != "never" and second["expires"] == "never"
    assert second["limits"] == {"max_jobs": 2}
    said(config, "rotate", new["id"], "--overlap", "0s")
    assert [row["state"] for row in said(config, "list")] == ["active", "expired", "active"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--scope", "root"], "Invalid enum value 'root' - at `scopes[0]`"),
        (["--limit", "max_jobs=many"], "NAME=NUMBER"),
        (["--limit", "max_jobs=0"], "limits.max_jobs"),
        (["--limit", "max_cats=1"], "max_cats"),
        (["--route", "v1"], "must begin with a slash"),
        (["--weight", "0"], "weight"),
        (["--ceiling", "best"], "ceiling"),
        (["--expires", "soon"], "say it like 90d"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_made(config: Path, options: list[str], told: str) -> None:
    result = run(config, "create", "alice", *options)
    assert isinstance(result.exception, BadRequest) and told in result.exception.message
    assert said(config, "list") == []


def test_a_key_is_found_by_the_beginning_of_its_id_if_that_is_enough(config: Path) -> None:
    made = said(config, "create", "alice")
    for beginning in ("", "abc", "ffffffff", made["id"][:3]):
        assert isinstance(run(config, "revoke", beginning).exception, NotFound)
    assert run(config, "revoke", made["id"][:6]).exit_code == 0


def test_a_key_for_the_configuration_is_made_without_the_broker() -> None:
    out = CliRunner().invoke(keys.app, ["new", "alice"]).stdout
    token = out.splitlines()[0].rpartition(" ")[2]
    assert f"{{owner: alice, sha256: {digest(token)}}}" in out


def test_times_are_read() -> None:
    assert [seconds(text) for text in ("10s", "30m", "12h", "90d")] == [10, 1800, 43_200, 7_776_000]
