"""`headrace redis-acl` and `headrace redis-functions`: the users that it prints are those that a server then has."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from headrace.broker import acl, embedded, scripts
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import ConfigError
from headrace.cli.main import app
from headrace.cli.redis import _passwords
from tests.system.conftest import until

LONG = "a-password-of-24-letters"


@pytest.fixture
def bare() -> Iterator[Any]:
    """A client of a server with a file for users, who are none yet."""
    with tempfile.TemporaryDirectory(prefix="hr-") as folder:
        acl_file, socket = Path(folder) / "users.acl", f"{folder}/redis.sock"
        acl_file.touch()
        words = ["--port", "0", "--unixsocket", socket, "--dir", folder, "--save", "", "--aclfile", str(acl_file)]
        process = subprocess.Popen([embedded.server_binary(), *words], stdout=subprocess.DEVNULL)
        try:
            until(lambda: Path(socket).exists(), 10)
            with redis.Redis(unix_socket_path=socket, protocol=2) as client:
                client.url = f"unix://{socket}"
                yield client
        finally:
            process.terminate()
            process.wait(10)


def invoke(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(app, list(arguments), env=env, catch_exceptions=True)


def test_what_is_printed_is_an_acl_file_and_new_passwords_are_shown_once_on_stderr() -> None:
    result = invoke("redis-acl", "--users", "gateway,replica")
    lines = result.stdout.splitlines()
    shown = dict(line.split("=", 1) for line in result.stderr.splitlines())
    assert lines == list(acl.lines({user: [password] for user, password in shown.items()}))
    assert list(shown) == ["gateway", "replica"]
    assert all(len(password) == 48 for password in shown.values())


def test_passwords_come_from_a_file_or_the_environment_and_are_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"# two, while one is replaced\ngateway={LONG}-new\ngateway={LONG}-old\n\n", "utf-8")
    env = {"HEADRACE_REDIS_PASSWORD_WORKER": LONG}
    result = invoke("redis-acl", "--users", "gateway,worker", "--passwords", str(file), env=env)
    assert result.stderr == ""
    assert LONG not in result.stdout
    assert result.stdout.splitlines() == list(acl.lines({"gateway": [f"{LONG}-new", f"{LONG}-old"], "worker": [LONG]}))


def test_rules_are_for_servers_whose_users_are_made_elsewhere() -> None:
    result = invoke("redis-acl", "--form", "rules", "--users", "gateway")
    assert json.loads(result.stdout) == {"gateway": " ".join(["on", *acl.rules("gateway", is_managed=True)])}
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gateway=short", "at least 16 characters"),
        (f"gatway={LONG}", "'gatway' is no user"),
        (LONG, "line 1 is not like user=password"),
    ],
)
def test_a_wrong_password_file_is_refused_without_saying_what_is_in_it(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "passwords"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=why) as caught:
        _passwords(["gateway"], file, {})
    assert LONG not in caught.value.message and "short" not in caught.value.message


def test_applied_users_and_functions_are_there_also_after_a_restart_of_the_server(bare: Any, tmp_path: Path) -> None:
    file = tmp_path / "passwords"
    file.write_text("".join(f"{user}={LONG}-{user}\n" for user in ("gateway", "ops", "loader")), "utf-8")
    result = invoke(
        "redis-acl", "--apply", "--users", "gateway,ops,loader", "--passwords", str(file),
        env={"HEADRACE_REDIS__URL": bare.url},
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert LONG not in result.output
    assert "lets everybody in" in result.stderr  # the user `default`
    bare.acl_load()  # what a restart does
    assert {b"gateway", b"ops", b"loader"} <= {name.encode() for name in bare.acl_users()}
    with redis.Redis.from_url(bare.url.replace("://", f"://gateway:{LONG}-gateway@"), protocol=2) as gateway:
        assert gateway.fcall(scripts.function("stats"), 1, "hr:{0000}:", "m")
        with pytest.raises(redis.exceptions.NoPermissionError):
            gateway.flushall()


def test_the_loader_brings_functions_and_prunes_those_of_others(bare: Any) -> None:
    bare.execute_command("ACL SETUSER", "loader", "on", f">{LONG}", *acl.rules("loader"))
    bare.function_load(scripts.library().replace(scripts.library_name(), "hr_0123456789ab"))
    env = {"HEADRACE_REDIS__URL": bare.url.replace("://", f"://loader:{LONG}@")}
    for _ in range(2):
        result = invoke("redis-functions", env=env)
        assert (result.exit_code, result.stdout) == (0, f"{scripts.library_name()} is there\n"), result.output
    result = invoke("redis-functions", "--prune", env=env)
    assert result.stdout == f"{scripts.library_name()} is there, hr_0123456789ab is deleted\n"
    assert len(bare.function_list()) == 1


def test_the_embedded_server_needs_neither() -> None:
    for command in (["redis-functions"], ["redis-acl", "--apply"]):
        assert "embedded server" in str(invoke(*command).exception)


def test_an_embedded_server_can_be_without_users() -> None:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, asyncio.Runner() as runner:
        server = EmbeddedServer(folder, has_users=False)
        runner.run(server.start())
        with redis.Redis.from_url(server.url, protocol=2) as client:
            assert client.acl_whoami() == "default"
            assert client.fcall(scripts.function("stats"), 1, "hr:{0000}:", "m")
        assert server.url_of("gateway") == server.url
        runner.run(server.stop())
