"""The broker's files on a real Valkey: its users can do their work and no more, its replica follows and takes over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from headrace.broker import embedded
from headrace.broker.embedded import EmbeddedServer
from headrace.broker.redis_broker import RedisBroker
from headrace.workers import engines
from headrace.workers.engines.scripted import oracle
from headrace.workers.worker import Worker
from tests.infra.tools import INFRA, run
from tests.serving import Pod, scripted_settings
from tests.support import eventually
from tests.system.conftest import free_ports, until

VALKEY = INFRA / "kubernetes" / "components" / "valkey"
KIND = INFRA / "kubernetes" / "overlays" / "kind"
TERRAFORM = (INFRA / "terraform" / "modules" / "broker" / "main.tf").read_text("utf-8")

TERRAFORM_RULES = dict(re.findall(r'^    (gateway|worker|ops)\s+= "(on [^"]+)"', TERRAFORM, re.M))


def kind_users(folder: Path) -> str:
    """The users of a try-out, as its script makes them."""
    script = folder / "make-secrets.sh"
    script.write_bytes((KIND / "make-secrets.sh").read_bytes())
    run(["sh", script])
    return (folder / "secrets" / "users.acl").read_text("utf-8")


def rules_of(where: str, folder: Path) -> dict[str, str]:
    """What each user may do, without its password."""
    if where == "terraform":
        return TERRAFORM_RULES
    lines = [line.split(maxsplit=2)[1:] for line in kind_users(folder).splitlines()]
    return {user: " ".join(word for word in rules.split() if word[0] != ">") for user, rules in lines}


@pytest.fixture(params=["terraform", "kind"])
async def as_user(
    request: pytest.FixtureRequest, redis_server: EmbeddedServer, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[Any]:
    """A way to the server as one of the users that the deployment has."""
    server: Any = redis_client
    for user, rules in rules_of(request.param, tmp_path).items():
        if user in ("gateway", "worker"):
            server.acl_deluser(user)
            server.execute_command("ACL", "SETUSER", user, ">secret", *rules.split())
    socket = redis_server.url.removeprefix("unix://")
    yield lambda user: f"unix://{user}:secret@{socket}"
    redis_client.acl_deluser("gateway", "worker")


async def test_pods_and_workers_can_do_their_work_as_their_users(as_user: Any, redis_server: EmbeddedServer) -> None:
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


@pytest.mark.parametrize("user", ["gateway", "worker"])
def test_users_can_do_nothing_else(as_user: Any, user: str) -> None:
    forbidden = ["FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG GET *", "SHUTDOWN", "ACL LIST", "SAVE"]
    foreign = ["GET other", "SET other 1", "SPUBLISH other 1", "SUBSCRIBE other", "REPLICAOF NO ONE"]
    with redis.Redis.from_url(as_user(user), protocol=2) as client:
        for command in forbidden + foreign:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command.split())
        assert client.set("hr:{0000}:x", 1)


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
    url = _line(tmp_path / "secrets" / "redis.env", "gateway-url")
    password = url.split(":")[2].partition("@")[0]
    old, new = nodes.values()

    def client(node: Node, user: str = "gateway", secret: str = password) -> redis.Redis:
        return redis.Redis(port=node.port, username=user, password=secret, protocol=2, decode_responses=True)

    def is_written() -> bool:
        with contextlib.suppress(redis.RedisError), client(old) as primary:
            return bool(primary.set("hr:{0000}:x", "kept", ex=60))
        return False

    until(is_written, 20)
    with client(new) as replica, client(old) as primary:
        until(lambda: replica.get("hr:{0000}:x") == "kept", 10)
        assert primary.info("memory")["maxmemory_policy"] == "noeviction"
        with pytest.raises(redis.exceptions.ReadOnlyError):
            replica.set("hr:{0000}:x", "2")
    # the runbook's failover: the old primary is gone, the replica is told to lead
    old.end()
    ops = _line(tmp_path / "secrets" / "valkey.env", "ops-password")
    with client(new, "ops", ops) as operator:
        operator.execute_command("REPLICAOF", "NO", "ONE")
        operator.config_set("min-replicas-to-write", 0)
    with client(new) as leading:
        assert leading.get("hr:{0000}:x") == "kept"
        assert leading.set("hr:{0000}:x", "2", ex=60)
