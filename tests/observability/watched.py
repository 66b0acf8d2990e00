"""A deployment of real processes, under load, that a real Prometheus watches by our own configuration."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import yaml

from headrace.broker import embedded, keys
from headrace.broker.messages import ScaleDecision
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from tests.infra.tools import INFRA, program
from tests.system.conftest import Machine, until

FOLDER = INFRA / "observability"
MODEL = "scripted"
CHAT = "/v1/chat/completions"


class Prometheus:
    """A server on our configuration and rules, that asks and evaluates every second."""

    def __init__(self, folder: Path, pods: list[str]) -> None:
        self.url = f"http://127.0.0.1:{_free_port()}"
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(configured(pods)), "utf-8")
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus", "apt-get install prometheus"),
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ask(self, path: str, **params: Any) -> Any:
        """The data of an answer; fails with Prometheus's own words for a query that it cannot read."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=10).json()
        assert answer["status"] == "success", f"{params}: {answer.get('error')}"
        return answer["data"]

    def query(self, expr: str) -> dict[tuple[tuple[str, str], ...], float]:
        """An instant query: value by labels."""
        rows = self.ask("query", query=expr)["result"]
        return {tuple(sorted(row["metric"].items())): float(row["value"][1]) for row in rows}

    def value(self, expr: str) -> float | None:
        """Of a query that has one series, or none."""
        found = list(self.query(expr).values())
        assert len(found) < 2, found
        return found[0] if found else None

    def history(self, expr: str) -> list[list[float]]:
        """Every series' values, second by second, over the last five minutes."""
        now = time.time()
        rows = self.ask("query_range", query=expr, start=now - 300, end=now, step=1)["result"]
        return [[float(value) for _, value in row["values"]] for row in rows]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def configured(pods: list[str]) -> dict[str, Any]:
    """infra/observability/prometheus.yml with other addresses, and nothing else but shorter times."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text("utf-8"))
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["rule_files"] = [str(FOLDER / file) for file in config["rule_files"]]
    [job] = config["scrape_configs"]
    job["http_sd_configs"] = [{"url": f"{pod}/metrics/targets", "refresh_interval": "1s"} for pod in pods]
    return config


class Load:
    """Requests of all kinds, one after the other, in a thread, until `stop`; and what an autoscaler would decide."""

    def __init__(self, machine: Machine) -> None:
        self._urls = machine.urls
        self._broker_url = embedded.url(str(machine.folder), "scaler")
        self._stopping = threading.Event()
        self.rounds = 0
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            asyncio.run(self._always())
        except Exception as error:  # noqa: BLE001  # `stop` raises it where the test is
            self.error = error

    async def _always(self) -> None:
        broker = RedisBroker(self._broker_url, RedisSettings(), QueueSettings())
        try:
            async with httpx.AsyncClient(timeout=20) as http:
                while not self._stopping.is_set():
                    await asyncio.gather(*(self._chat(http, url) for url in self._urls for _ in range(2)))
                    await self._odd_ones(http)
                    for direction, reason in (("hold", "steady"), ("up", "backlog")):
                        now_ms = time.time_ns() // 1_000_000
                        await broker.note_decision(MODEL, ScaleDecision(now_ms, 2, 2, direction, reason))  # type: ignore[arg-type]
                    self.rounds += 1
        finally:
            await broker.close()

    async def _chat(self, http: httpx.AsyncClient, url: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
        answer = await http.post(url + CHAT, json=body)
        assert answer.status_code == 200, answer.text

    async def _odd_ones(self, http: httpx.AsyncClient) -> None:
        """A reader that comes back at the other pod, a job that is cancelled, and a request that is refused."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "odd"}], "max_tokens": 60, "stream": True}
        async with http.stream("POST", self._urls[0] + CHAT, json=body) as cut:
            job = cut.headers["x-request-id"]
            with suppress(StopAsyncIteration):
                await anext(cut.aiter_raw())
        resumed = await http.get(f"{self._urls[1]}/v1/streams/{job}")
        assert resumed.status_code == 200, resumed.text
        async with http.stream("POST", self._urls[0] + CHAT, json=body) as running:
            await http.delete(f"{self._urls[1]}/v1/streams/{running.headers['x-request-id']}")
            await running.aread()
        refused = await http.post(self._urls[0] + CHAT, json={**body, "model": "unknown"})
        assert refused.status_code == 404


class Watched:
    """See the module: two pods, two replicas, and who watches them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.workers: list[subprocess.Popen[str]] = []
        self.has_lost = False
        """A replica was killed."""

    def start(self) -> Iterator[None]:
        """Everything up and under load until the iterator is closed."""
        machine = self.machine
        machine.start("api", "--port", str(machine.ports[0]))
        machine.start("api", "--port", str(machine.ports[1]))
        self.workers = [machine.start("worker") for _ in range(2)]
        self.prometheus = Prometheus(machine.folder, machine.urls)
        try:
            until(lambda: self._is_watched(), 60)
            self.load = Load(machine)
            try:
                yield
            finally:
                self.load.stop()
        finally:
            self.prometheus.close()

    def _is_watched(self) -> bool:
        with suppress(httpx.HTTPError, AssertionError, json.JSONDecodeError):
            return self.prometheus.query("count by (role) (up == 1)") == {
                (("role", "pod"),): 2,
                (("role", "replica"),): 2,
            }
        return False

    def kill_a_replica(self) -> str:
        """Without a word, while it runs something; another one is started. Answers where its metrics were."""
        worker = self.workers.pop(0)
        [lost] = [location for location in self._replicas() if _listens(worker.pid, location)]
        until(lambda: self._begin_a_long_job() == worker.pid, 30)
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        self.workers.append(self.machine.start("worker"))
        self.has_lost = True
        return lost

    def _replicas(self) -> list[str]:
        targets = httpx.get(f"{self.machine.urls[0]}/metrics/targets").json()
        return [each["targets"][0] for each in targets if each["labels"]["__meta_headrace_role"] == "replica"]

    def _begin_a_long_job(self) -> int:
        """The process that runs it now, which goes on without a reader."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "stream": True}
        headers = {"x-on-disconnect": "continue"}
        with httpx.stream("POST", self.machine.urls[0] + CHAT, json=body, headers=headers, timeout=20) as answer:
            next(answer.iter_raw())
            job = answer.headers["x-request-id"]
        with redis.Redis.from_url(self.machine.broker_url, protocol=2) as client:
            worker = client.hget(keys.key("job", 0, job), "worker")
        assert isinstance(worker, bytes)
        return int(worker.decode().split("-")[-2])  # its id is host, process and chance


def _listens(pid: int, location: str) -> bool:
    port = int(location.rpartition(":")[2])
    return any(each.laddr.port == port for each in psutil.Process(pid).net_connections("inet"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
