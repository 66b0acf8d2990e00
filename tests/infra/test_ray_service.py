"""What KubeRay does with ray-cluster.yaml, on a real Ray: a head without work, a node, a token, and the same PUT."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml

from headrace.broker.embedded import EmbeddedServer
from headrace.broker.redis_broker import RedisBroker
from headrace.workers.engines.scripted import oracle
from tests.infra.tools import ROOT
from tests.serving import Pod, scripted_settings
from tests.support import eventually
from tests.system.conftest import alive, free_ports, until

TOKEN = "0123456789abcdef" * 2
LOAD_S = 90.0


class Cluster(NamedTuple):
    """A Ray cluster: where its dashboard and its GCS listen, and the file that its nodes read."""

    dashboard: str
    gcs: str
    config: Path


def _start(env: dict[str, str], log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--block"]
    common = ["--node-ip-address", "127.0.0.1", "--object-store-memory", "80000000"]
    with log.open("w") as output:
        return subprocess.Popen(
            [*command, *common, *arguments], env=env, stdout=output, stderr=output, start_new_session=True
        )


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    started = [
        each
        for process in processes
        if process.poll() is None
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    ]
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs(started, 4)
    for each in alive(left):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    for process in processes:
        process.wait(20)


@pytest.fixture(scope="module")
def cluster(redis_server: EmbeddedServer) -> Iterator[Cluster]:
    folder = Path(mkdtemp(prefix="hr-ray-", dir="/tmp"))
    config = folder / "headrace.yaml"
    autoscaling = {"min_replicas": 1, "max_replicas": 2}
    models = [{"name": "scripted", "engine": "scripted", "cpus": 0.5, "slots": 8, "autoscaling": autoscaling}]
    config.write_text(yaml.safe_dump({"models": models, "worker": {"drain_s": 0.2}}), "utf-8")
    gcs, dashboard, head_agent, node_agent = free_ports(4)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HEADRACE_"))}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    }
    # as in the manifests: the controller, on the head, decides how many replicas there are; replicas are on the node
    of_head, of_node = (env | {"HEADRACE_REDIS__URL": redis_server.url_of(user)} for user in ("scaler", "worker"))
    head = ["--head", "--num-cpus", "0", "--port", str(gcs), "--dashboard-port", str(dashboard)]
    head += ["--dashboard-agent-listen-port", str(head_agent), "--temp-dir", str(folder / "ray")]
    node = ["--address", f"127.0.0.1:{gcs}", "--num-cpus", "1", "--dashboard-agent-listen-port", str(node_agent)]
    processes = [_start(of_head, folder / "head.log", *head)]
    try:
        until(lambda: _is_up(f"http://127.0.0.1:{dashboard}/api/version", processes), LOAD_S)
        processes.append(_start(of_node, folder / "node.log", *node))
        until(lambda: _is_up(f"http://127.0.0.1:{node_agent}/api/healthz", processes), LOAD_S)
        yield Cluster(f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{gcs}", config)
    finally:
        _end(processes)
        shutil.rmtree(folder)


def _is_up(url: str, processes: list[subprocess.Popen[bytes]]) -> bool:
    assert all(process.poll() is None for process in processes), "Ray has ended"
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=5).status_code == 200
    return False


def _serve_config(config: Path) -> Any:
    """The deployed configuration, for the model and the file of this test."""
    service = yaml.safe_load((ROOT / "ray-cluster.yaml").read_text("utf-8"))
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    application["name"] = application["args"]["model"] = "scripted"
    application["args"]["config"] = str(config)
    return serve


async def test_a_model_of_the_serve_configuration_answers(cluster: Cluster, redis_server: EmbeddedServer) -> None:
    where = f"{cluster.dashboard}/api/serve/applications/"
    settings = scripted_settings(redis_server)
    pod = Pod(settings, RedisBroker(redis_server.url_of("gateway"), settings.redis, settings.queue))
    async with httpx.AsyncClient(timeout=60) as http:
        assert (await http.put(where, json=_serve_config(cluster.config))).status_code in (401, 403)
        http.headers["Authorization"] = f"Bearer {TOKEN}"
        answer = await http.put(where, json=_serve_config(cluster.config))
        assert answer.status_code == 200, answer.text

        async def is_running() -> bool:
            state = (await http.get(where)).json()["applications"]["scripted"]
            assert state["status"] != "DEPLOY_FAILED", state["message"]
            return bool(state["status"] == "RUNNING")

        await eventually(is_running, LOAD_S)
        said = (await http.get(where)).text
        for user in ("scaler", "worker"):  # where the broker is, and its passwords, stay on the nodes
            assert redis_server.url_of(user) not in said
        try:
            await eventually(lambda: pod.started)
            body = {"model": "scripted", "messages": [{"role": "user", "content": "ray"}], "max_tokens": 3}
            done = await http.post(f"{pod.url}/v1/chat/completions", json=body)
            text = "".join(f" {oracle('ray', 0, 0, index):08x}" for index in range(3))
            assert done.json()["choices"][0]["message"]["content"] == text
        finally:
            await pod.stop()


@pytest.mark.parametrize("token", [None, "f" * 32])
def test_without_its_token_nobody_runs_code_on_ray(cluster: Cluster, token: str | None) -> None:
    """Neither as a driver, nor by the dashboard's jobs, which have been a door for worms."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = clean | {"RAY_AUTH_MODE": "token"} | ({"RAY_AUTH_TOKEN": token} if token else {"HOME": "/nonexistent"})
    code = f"import ray; ray.init('{cluster.gcs}', log_to_driver=False); print('IN')"
    driver = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert driver.returncode != 0 and "IN" not in driver.stdout
    assert "token" in (driver.stdout + driver.stderr).lower()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for path, body in (("/api/jobs/", {"entrypoint": "id"}), ("/api/serve/applications/", {"applications": []})):
        send = httpx.post if "jobs" in path else httpx.put
        assert send(f"{cluster.dashboard}{path}", json=body, headers=headers).status_code in (401, 403)
