"""The same load through others that forward tokens without storing them, and through headrace, in one run.

`python bench/peers.py --venvs DIR --points 100x20,1000x20 --repetitions 3`. DIR holds a virtual environment for each
peer that has one (`litellm` with `litellm[proxy]`, `vllm-router`); nginx and HAProxy are Debian's. A peer that cannot
be measured is named with the reason. Repetitions alternate over all peers. Prints a JSON line per measurement, then a
table of medians and ranges: CPU microseconds per token of all processes, the source that feeds a router included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # also when it is run by its path

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.points import deployed
from bench.points_measure import MODEL, Point, World, free_ports, measure, until_served
from headrace.broker.embedded import die_with_parent
from headrace.broker.tasks import loop_factory

HERE = Path(__file__).parent

NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 2;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream source {{ server 127.0.0.1:{upstream}; keepalive 2000; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://source; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }} }}
}}
"""


class Peer(NamedTuple):
    """How to start one: its command for (folder, port, upstream's port, point), and more environment."""

    command: Callable[[Path, int, int, Point], list[str]]
    env: Mapping[str, str] = MappingProxyType({})
    has_source: bool = True


def _nginx(folder: Path, port: int, upstream: int, point: Point) -> list[str]:
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, port=port, upstream=upstream))
    return [shutil.which("nginx") or "/usr/sbin/nginx", "-p", str(folder), "-c", str(config)]


def _litellm(venvs: Path) -> Callable[[Path, int, int, Point], list[str]]:
    def command(folder: Path, port: int, upstream: int, point: Point) -> list[str]:
        params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "none"}
        config = folder / "litellm.yaml"
        config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
        return [str(venvs / "litellm/bin/litellm"), "--config", str(config), "--port", str(port), "--host", "127.0.0.1"]

    return command


def _vllm_router(venvs: Path) -> Callable[[Path, int, int, Point], list[str]]:
    def command(folder: Path, port: int, upstream: int, point: Point) -> list[str]:
        return [
            str(venvs / "vllm-router/bin/vllm-router"), "--worker-urls", f"http://127.0.0.1:{upstream}", "--host",
            "127.0.0.1", "--port", str(port), "--policy", "round_robin", "--log-level", "error",
            "--prometheus-port", str(free_ports(1)[0]),
        ]  # fmt: skip

    return command


def _app(kind: str) -> Callable[[Path, int, int, Point], list[str]]:
    def command(folder: Path, port: int, upstream: int, point: Point) -> list[str]:
        last = upstream if kind == "proxy" else point.interval_ms
        return [sys.executable, str(HERE / "peers_apps.py"), kind, str(port), str(last)]

    return command


def peers(venvs: Path) -> dict[str, Peer]:
    return {
        "nginx": Peer(_nginx),
        "vllm-router": Peer(_vllm_router(venvs)),
        "fastapi + httpx": Peer(_app("proxy")),
        "litellm": Peer(
            _litellm(venvs),  # without keys, as headrace is here
            MappingProxyType({"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}),
        ),
        "ray serve": Peer(_app("serve"), has_source=False),
        "ray serve haproxy": Peer(
            _app("serve"), MappingProxyType({"RAY_SERVE_ENABLE_HA_PROXY": "1"}), has_source=False
        ),
    }


class Started:
    """A peer and its source; all their children are counted with them."""

    def __init__(self, port: int, processes: dict[str, asyncio.subprocess.Process]) -> None:
        self.ports = [port]
        self._processes = processes

    def pids(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for role, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = psutil.Process(process.pid).children(recursive=True)
                found[role] = [process.pid, *(each.pid for each in tree)]
        return found

    async def close(self) -> None:
        for process in self._processes.values():
            tree = [] if process.returncode is not None else psutil.Process(process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 15)
            for each in tree:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            if process.returncode is None:
                process.kill()
                await process.wait()


@contextlib.asynccontextmanager
async def started(peer: Peer, point: Point) -> AsyncIterator[Started]:
    with tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        port, upstream = free_ports(2)
        processes: dict[str, asyncio.subprocess.Process] = {}
        world = Started(port, processes)
        try:
            if peer.has_source:
                source = [sys.executable, str(HERE / "peers_source.py"), str(upstream), str(point.interval_ms)]
                processes["source"] = await _spawn(source, folder, {})
            command = peer.command(folder, port, upstream, point)
            process = processes["peer"] = await _spawn(command, folder, peer.env)
            served, ended = asyncio.ensure_future(until_served(port)), asyncio.ensure_future(process.wait())
            await asyncio.wait({served, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            if not served.done():
                served.cancel()
                raise OSError(f"it ended: {_log_of(command, folder).read_text('utf-8')[-300:]}")
            await served
            yield world
        finally:
            await world.close()


def _log_of(command: list[str], folder: Path) -> Path:
    return folder / f"{Path(command[0]).name}.log"


async def _spawn(command: list[str], folder: Path, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    with _log_of(command, folder).open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=die_with_parent, env={**os.environ, **env},
        )  # fmt: skip


async def once(name: str, peer: Peer | None, point: Point, chosen: argparse.Namespace) -> dict[str, Any]:
    """One measurement; what went wrong, if the peer cannot be measured."""
    place = deployed(point) if peer is None else started(peer, point)
    try:
        async with place as world:
            checked: World = world
            return {"peer": name, **await measure(checked, point, chosen.tokens, chosen.seconds)}
    except (OSError, TimeoutError) as error:
        return {"peer": name, "point": str(point), "error": repr(error)}


def show(rows: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    table = Table(
        "peer", "point", "CPU µs/token", "tokens/s", "TTFT p50 ms", "TTFT p99 ms", "ITL added p99 ms", "wrong"
    )
    for (name, point), told in rows.items():

        def cell(pick: Callable[[dict[str, Any]], float], told: list[dict[str, Any]] = told) -> str:
            values = [pick(each) for each in told]
            return f"{statistics.median(values):g} ({min(values):g} to {max(values):g})"

        table.add_row(
            name, point, cell(lambda t: t["cpu_us_per_token"]["all"]), cell(lambda t: t["tokens_per_s"]),
            cell(lambda t: t["ttft_added_ms"]["p50"]), cell(lambda t: t["ttft_added_ms"]["p99"]),
            cell(lambda t: t["itl_added_ms"]["p99"]), cell(lambda t: t["wrong"]),
        )  # fmt: skip
    Console(width=160).print(table)


def main() -> None:
    options = argparse.ArgumentParser(prog="peers", description=__doc__)
    options.add_argument("--venvs", type=Path, default=Path("venvs"))
    options.add_argument("--points", default="1x20,10x20,100x20,1000x20")
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--only", help="names of peers, with commas")
    chosen = options.parse_args()
    everybody: dict[str, Peer | None] = {"headrace": None, **peers(chosen.venvs.resolve())}
    names = chosen.only.split(",") if chosen.only else list(everybody)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for _ in range(chosen.repetitions):
        for each in chosen.points.split(","):
            for name in names:
                with asyncio.Runner(loop_factory=loop_factory()) as runner:
                    told = runner.run(once(name, everybody[name], Point.of(each), chosen))
                print(json.dumps(told), flush=True)
                if "error" not in told:
                    rows[name, each].append(told)
    show(rows)


if __name__ == "__main__":
    main()
