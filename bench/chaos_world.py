"""The deployment that chaos is made in: real processes, started again when they end, behind a proxy to Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import yaml

from bench.proxy import Proxy
from headrace.broker.embedded import EmbeddedServer, as_user, die_with_parent, socket_path
from headrace.broker.errors import BrokerDown
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from headrace.broker.tasks import cancel_all
from headrace.cli import processes

MODEL = "scripted"
LEASE_S = 1.0
_STOP_S = 15.0
_PRESENCE_S = 60.0
_STEADY_S = 10.0
"""A process's memory is compared with what it had at this age."""


def configuration(url: str, tokens_per_s: float) -> dict[str, object]:
    """Short leases, so that a run is quick; deaths are not what it tests, so they do not count."""
    return {
        "models": [{"name": MODEL, "engine": "scripted", "tokens_per_s": tokens_per_s, "slots": 256, "cpus": 0.1}],
        "redis": {"url": url, "timeout_s": 2.0},
        "queue": {"lease_s": LEASE_S, "reader_lease_s": 3.0, "max_deaths": 100_000, "log_ttl_s": 900.0},
        "api": {"grace_s": 20.0, "drain_s": 1.0, "heartbeat_s": 2.0},
        "worker": {"drain_s": 0.3},
    }


class Process:
    """One pod or worker, started again whenever it ends."""

    def __init__(self, role: str, arguments: list[str], log: Path, env: dict[str, str]) -> None:
        self.role = role
        self.starts = 0
        self.steady_bytes = 0
        """Memory in use once it had settled; 0 until then."""
        self._arguments = arguments
        self._log = log
        self._env = env
        self._process: asyncio.subprocess.Process | None = None
        self._started_at = 0.0
        self._is_stopping = False

    async def keep(self) -> None:
        while not self._is_stopping:
            with self._log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "headrace.cli.main", *self._arguments, stdin=asyncio.subprocess.DEVNULL,
                    stdout=output, stderr=output, env=self._env, start_new_session=True, preexec_fn=die_with_parent,
                )  # fmt: skip
            self.starts += 1
            self.steady_bytes, self._started_at = 0, time.monotonic()
            await self._process.wait()
            await asyncio.sleep(0.1)

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def growth_bytes(self) -> int | None:
        """How much memory it has gained since it had settled; None if it is younger than that."""
        if self._process is None or time.monotonic() - self._started_at < _STEADY_S:
            return None
        used = processes.usage([self._process.pid]).get(self._process.pid)
        if used is None:
            return None
        self.steady_bytes = self.steady_bytes or used.rss_bytes
        return used.rss_bytes - self.steady_bytes

    async def stop(self) -> None:
        self._is_stopping = True
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self.signal(signal.SIGKILL)
                await self._process.wait()


class World:
    """Valkey, its proxy, pods and workers. `broker` speaks to Valkey past the proxy."""

    def __init__(self, folder: Path, pods: int, workers: int, tokens_per_s: float) -> None:
        self.folder = folder
        self.valkey = EmbeddedServer(str(folder))
        self.proxy = Proxy(folder / "proxy.sock", socket_path(str(folder)))
        config = folder / "headrace.yaml"
        config.write_text(yaml.safe_dump(configuration(self.proxy.url, tokens_per_s)), "utf-8")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}

        def env_of(user: str) -> dict[str, str]:
            return {
                **clean,
                "HEADRACE_DATA": str(folder),
                "HEADRACE_REDIS__URL": as_user(self.proxy.url, str(folder), user),
            }

        self.ports = _free_ports(pods)
        self.pods = [
            Process(
                "pod",
                ["api", "--port", str(port), "--config", str(config)],
                folder / f"pod-{port}.log",
                env_of("gateway"),
            )
            for port in self.ports
        ]
        self.workers = [
            Process("worker", ["worker", "--config", str(config)], folder / f"worker-{number}.log", env_of("worker"))
            for number in range(workers)
        ]
        # its presence says that workers are wanted, also while all of them are down, and while the broker is
        self.broker = RedisBroker(
            self.valkey.url_of("scaler"), RedisSettings(timeout_s=2.0), QueueSettings(lease_s=_PRESENCE_S)
        )
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.valkey.start()
        await self.proxy.start()
        await self._present()
        self._tasks = [asyncio.create_task(each.keep()) for each in (*self.pods, *self.workers)]
        self._tasks.append(asyncio.create_task(self._stay_present()))

    async def close(self) -> None:
        await asyncio.gather(*(each.stop() for each in (*self.pods, *self.workers)))
        await cancel_all(self._tasks)
        await self.broker.close()
        await self.proxy.close()
        await self.valkey.stop()

    def port(self, choice: random.Random) -> int:
        return choice.choice(self.ports)

    async def kill_valkey(self, away_s: float, *, cut_bytes: int = 0) -> None:
        """SIGKILL, then a start on what its log holds, less `cut_bytes` from the end."""
        process = self.valkey.process
        assert process is not None
        process.kill()
        await process.wait()
        await asyncio.sleep(away_s)
        if cut_bytes:
            self._cut_log(cut_bytes)
        await self.valkey.start()
        await self._present()

    def _cut_log(self, count: int) -> None:
        logs = sorted(
            (self.folder / "broker" / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime
        )
        size = logs[-1].stat().st_size
        os.truncate(logs[-1], max(0, size - count))

    async def _present(self) -> None:
        with contextlib.suppress(BrokerDown):
            await self.broker.present("cluster", "chaos", MODEL, {})

    async def _stay_present(self) -> None:
        while True:
            await self._present()
            for each in (*self.pods, *self.workers):
                each.growth_bytes()
            await asyncio.sleep(1.0)

    async def keys_without_expiry(self) -> list[str]:
        """Names of the keys that would stay for ever."""
        import redis.asyncio as redis

        async with redis.Redis.from_url(self.valkey.url, protocol=2) as client:
            return [key.decode() async for key in client.scan_iter(count=1000) if await client.ttl(key) == -1]

    def said(self) -> str:
        return "\n".join(path.read_text("utf-8", errors="replace") for path in sorted(self.folder.glob("*.log")))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
