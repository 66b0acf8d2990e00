"""A real Redis Cluster on this machine: three primaries, and a replica of the first."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from headrace.broker import embedded, keys
from tests.system.conftest import free_ports, until

SLOTS = 16384


class Cluster:
    """`servers[0..2]` are primaries of a third of the slots each, `servers[3]` is the replica of the first."""

    def __init__(self, folder: Path) -> None:
        self.ports, buses = free_ports(4), free_ports(8)[4:]
        self._folder = folder
        self.servers = [self._start(port, bus) for port, bus in zip(self.ports, buses, strict=True)]
        self.url = f"redis://127.0.0.1:{self.ports[1]}"
        self._clients = [redis.Redis(port=port, protocol=2) for port in self.ports]
        for client in self._clients:
            until(lambda client=client: _answers(client), 20)  # type: ignore[misc]
        for number in range(3):
            first, last = SLOTS * number // 3, SLOTS * (number + 1) // 3 - 1
            self.ask(number, "CLUSTER", "ADDSLOTSRANGE", first, last)
            self.ask(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port, bus in zip(self.ports[1:], buses[1:], strict=True):
            self.ask(0, "CLUSTER", "MEET", "127.0.0.1", port, bus)
        until(lambda: all(len(self.ask(n, "CLUSTER", "NODES").splitlines()) == 4 for n in range(4)), 20)
        self.ask(3, "CLUSTER", "REPLICATE", self.id_of(0))
        until(lambda: all(b"cluster_state:ok" in self.ask(n, "CLUSTER", "INFO") for n in range(4)), 30)
        until(lambda: self._clients[3].info("replication").get("master_link_status") == "up", 30)

    def _start(self, port: int, bus: int) -> subprocess.Popen[bytes]:
        data = self._folder / str(port)
        data.mkdir()
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "cluster-enabled": "yes",
            "cluster-port": bus,
            "cluster-node-timeout": 1500,
            "dir": data,
            "appendonly": "yes",
            "save": "",
        }
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        with (data / "log").open("w") as log:
            return subprocess.Popen([embedded.server_binary(), *words], stdout=log, stderr=log)

    def ask(self, number: int, *command: Any) -> Any:
        return _raw(self._clients[number], command)

    def id_of(self, number: int) -> str:
        return str(self.ask(number, "CLUSTER", "MYID").decode())

    def shards_at(self, number: int, shards: int) -> list[int]:
        """Which of so many shards a server holds now."""
        return [shard for shard in range(shards) if _holds(self.ask(number, "CLUSTER", "NODES"), shard)]

    def end(self) -> None:
        for client in self._clients:
            client.close()
        for server in self.servers:
            server.kill()
            server.wait()


def _raw(client: Any, command: tuple[Any, ...]) -> Any:
    """The answer as it came: redis-py would make dictionaries of these."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command(*command)
        return connection.read_response()
    finally:
        client.connection_pool.release(connection)


def _answers(client: redis.Redis) -> bool:
    with contextlib.suppress(redis.RedisError):
        return bool(client.ping())
    return False


def _holds(nodes: bytes, shard: int) -> bool:
    """Does the server that says this hold the slot of a shard?"""
    slot = key_slot(keys.base(shard).encode())
    [own] = [line.split() for line in nodes.decode().splitlines() if "myself" in line]
    ranges = [tuple(map(int, word.split("-"))) for word in own[8:] if not word.startswith("[")]
    return any(each[0] <= slot <= each[-1] for each in ranges)


@contextlib.contextmanager
def redis_cluster(folder: Path) -> Iterator[Cluster]:
    cluster = Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()
