"""The broker's files on a real Valkey: its users can do their work and no more, its replica follows and takes over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from headrace.broker import acl, embedded, keys, scripts
from headrace.broker.redis_broker import RedisBroker
from headrace.workers import engines
from headrace.workers.engines.scripted import oracle
from headrace.workers.worker import Worker
from tests.infra.tools import HEADRACE, INFRA, run
from tests.serving import Pod, scripted_settings
from tests.support import eventually
from tests.system.conftest import free_ports, until
from tests.users import SECRET, Server

VALKEY = INFRA / "kubernetes" / "components" / "valkey"
KIND = INFRA / "kubernetes" / "overlays" / "kind"
RULES = INFRA / "terraform" / "modules" / "broker" / "rules.json"
USERS = ("gateway", "worker", "scaler", "loader", "ops")


def kind_users(folder: Path) -> str:
    """The users of a try-out, as its script makes them."""
    script = folder / "make-secrets.sh"
    script.write_bytes((KIND / "make-secrets.sh").read_bytes())
    run(["sh", script], env={"HEADRACE": str(HEADRACE)})
    return (folder / "secrets" / "users.acl").read_text("utf-8")


def test_terraform_gives_users_the_rights_that_the_code_says() -> None:
    said = json.loads(RULES.read_text("utf-8"))
    wanted = {user: " ".join(["on", *acl.rules(user, is_managed=True)]) for user in USERS}
    assert said == wanted, f"headrace redis-acl --form rules --users {','.join(USERS)} >{RULES}"


def test_a_try_out_has_the_users_of_the_code_and_keeps_no_password_of_theirs_in_the_servers_file(
    tmp_path: Path,
) -> None:
    users = kind_users(tmp_path)
    lines = (tmp_path / "secrets" / "passwords").read_text("utf-8").splitlines()
    passwords = dict(line.split("=") for line in lines)
    assert users.splitlines() == list(acl.lines({user: [password] for user, password in passwords.items()}))
    assert passwords.keys() == acl.USERS.keys()
    assert not any(password in users for password in passwords.values())
    urls = (tmp_path / "secrets" / "redis.env").read_text("utf-8").splitlines()
    assert urls == [
        f"{user}-url=redis://{user}:{passwords[user]}@headrace-valkey:6379/0"
        for user in ("gateway", "worker", "scaler", "loader")
    ]


@pytest.fixture
async def as_user(redis_server: Server, redis_client: redis.Redis) -> AsyncIterator[Any]:
    """A way to the server as one of the users that Terraform makes."""
    server: Any = redis_client
    for user, rules in json.loads(RULES.read_text("utf-8")).items():
        server.execute_command("ACL SETUSER", f"headrace-{user}", f">{SECRET}", *rules.split())
    yield lambda user: redis_server.url_of(f"headrace-{user}")
    redis_client.acl_deluser(*(f"headrace-{user}" for user in USERS))


async def test_pods_and_workers_can_do_their_work_as_their_users(as_user: Any, redis_server: Server) -> None:
    settings = scripted_settings(redis_server)
    gateway = RedisBroker(as_user("gateway"), settings.redis, settings.queue)
    broker = RedisBroker(as_user("worker"), settings.redis, settings.queue)
    await broker.open()
    worker = Worker(settings, settings.models[0], broker, engines.make(settings.models[0], settings.data_dir))
    await worker.start()
    running = asyncio.create_task(worker.run())
    pod = Pod(settings, gateway)
    try:
        await eventually(lambda: pod.started)
        body = {"model": "scripted", "messages": [{"role": "user", "content": "acl"}], "max_tokens": 5}
        async with httpx.AsyncClient(base_url=pod.url) as http:
            answer = await http.post("/v1/chat/completions", json=body, headers={"Idempotency-Key": "k"})
            assert answer.json()["choices"][0]["message"]["content"] == "".join(
                f" {oracle('acl', 0, 0, index):08x}" for index in range(5)
            )
            job = answer.headers["x-request-id"]
            streamed = (await http.get(f"/v1/streams/{job}")).text
            assert "[DONE]" in streamed and "error" not in streamed
            assert (await http.delete(f"/v1/streams/{job}")).status_code == 200
            assert (await http.get("/metrics")).status_code == 200
    finally:
        await pod.stop()
        await worker.drain()
        await running
        await broker.close()


class Node:
    """One server of the component, started by its own script."""

    def __init__(self, folder: Path, name: str, primary: str, ports: dict[str, int]) -> None:
        self.port = ports[name]
        data = folder / name
        data.mkdir(exist_ok=True)
        config = folder / "config"
        (config / "primary").write_text(primary, "utf-8")
        binaries = folder / "bin"
        binaries.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (binaries / "valkey-server").symlink_to(embedded.server_binary())
        acl = ["--port", str(self.port), "--aclfile", str(folder / "secrets" / "users.acl")]
        with (data / "log").open("w") as log:
            self.process = subprocess.Popen(
                ["sh", VALKEY / "start.sh", *acl, "--bind", "127.0.0.1"],
                env={
                    **os.environ,
                    "PATH": f"{binaries}:{os.environ['PATH']}",
                    "HOSTNAME": name,
                    "DATA_FOLDER": str(data),
                    "CONFIG_FOLDER": str(config),
                    "PRIMARY_HOST": "127.0.0.1",
                    "PRIMARY_PORT": str(ports[primary]),
                    "REPLICA_PASSWORD": _line(folder / "secrets" / "valkey.env", "replica-password"),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def _line(file: Path, name: str) -> str:
    [value] = re.findall(rf"^{name}=(.*)$", file.read_text("utf-8"), re.M)
    return str(value)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Node]]:
    """A primary and its replica, as the component starts them."""
    kind_users(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "valkey.conf").write_bytes((VALKEY / "valkey.conf").read_bytes())
    ports = dict(zip(("headrace-valkey-0", "headrace-valkey-1"), free_ports(2), strict=True))
    up = {name: Node(tmp_path, name, "headrace-valkey-0", ports) for name in ports}
    try:
        yield up
    finally:
        for node in up.values():
            node.end()


def test_a_primary_writes_only_with_its_replica_and_the_replica_can_take_over(
    nodes: dict[str, Node], tmp_path: Path
) -> None:
    passwords = dict(line.split("=") for line in (tmp_path / "secrets" / "passwords").read_text("utf-8").splitlines())
    key, (old, new) = keys.key("secret", 0), nodes.values()

    def client(node: Node, user: str = "gateway") -> Any:
        return redis.Redis(
            port=node.port, username=user, password=passwords[user], protocol=2, decode_responses=True, driver_info=None
        )

    def is_written() -> bool:
        with contextlib.suppress(redis.RedisError), client(old) as primary:
            return bool(primary.set(key, "kept", ex=60))
        return False

    until(is_written, 20)
    with client(old, "loader") as loader:
        loader.function_load(scripts.library())
    with client(new) as replica, client(old) as primary:
        until(lambda: replica.get(key) == "kept", 10)
        assert primary.info("memory")["maxmemory_policy"] == "noeviction"
        with pytest.raises(redis.exceptions.ReadOnlyError):
            replica.set(key, "2")
    # the runbook's failover: the old primary is gone, the replica is told to lead
    old.end()
    with client(new, "ops") as operator:
        operator.execute_command("REPLICAOF", "NO", "ONE")
        operator.config_set("min-replicas-to-write", 0)
    with client(new) as leading:
        assert leading.get(key) == "kept"
        assert leading.set(key, "2", ex=60)
        assert leading.fcall(scripts.function("stats"), 1, keys.base(0), "m")  # the functions came along
