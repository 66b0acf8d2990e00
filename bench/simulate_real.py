"""The simulator against the real thing: the same requests at a local Ray Serve with the scripted engine, and simulated.

    .venv/bin/python bench/simulate_real.py [--seconds 120] [--rate 4.4] [--replicas 2] [--seed 1]

Prints the quantiles of TTFT of both. The fleet is fixed, so that what is compared is the queue, the claims and the
replicas; TTFT is measured by an HTTP client, from before the request until the first content.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from headrace.cluster.simulation.fleet import Fleet, ReplicaModel, World
from headrace.cluster.simulation.rivals import Static
from headrace.cluster.simulation.trace import Trace, poisson

SLOTS, RATE, PREFILL = 4, 25.0, 2000.0
_START_S = 120.0


def settings(replicas: int) -> dict[str, object]:
    """JSON is YAML too."""
    model = {
        "name": "scripted",
        "engine": "scripted",
        "slots": SLOTS,
        "tokens_per_s": RATE,
        "prefill_tokens_per_s": PREFILL,
        "replicas": replicas,
        "cpus": 0.1,
    }
    return {"models": [model]}


async def ask(client: httpx.AsyncClient, url: str, tokens: int, limit: int) -> float:
    """Seconds until the first content of one stream."""
    # the chat's only message: four bytes a token, as the scripted engine counts
    body = {"model": "scripted", "stream": True, "max_tokens": limit}
    body["messages"] = [{"role": "user", "content": "x" * (4 * tokens)}]
    began, first = time.perf_counter(), float("nan")
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if (
                np.isnan(first)
                and line.startswith("data: {")
                and json.loads(line[6:])["choices"][0]["delta"].get("content")
            ):
                first = time.perf_counter() - began
    return first


async def play(url: str, trace: Trace) -> NDArray[np.float64]:
    """TTFT of every request, each sent at its time whatever became of the others."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        begin, sent = loop.time() + 0.5, []
        for at, tokens, limit in zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True):
            await asyncio.sleep(max(0.0, begin + float(at) - loop.time()))
            sent.append(asyncio.create_task(ask(client, url, int(tokens), int(limit))))
        return np.array(await asyncio.gather(*sent))


def serve(folder: Path, replicas: int) -> tuple[subprocess.Popen[bytes], str]:
    config = folder / "headrace.yaml"
    config.write_text(json.dumps(settings(replicas)), "utf-8")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = {**os.environ, "HEADRACE_DATA": str(folder / "data"), "HEADRACE_PORT": str(port)}
    command = [sys.executable, "-m", "headrace.cli.main", "serve", "--config", str(config)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + _START_S
    while b"stop with Ctrl-C" not in (folder / "log").read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit((folder / "log").read_text("utf-8"))
        time.sleep(0.1)
    return process, f"http://127.0.0.1:{port}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rate", type=float, default=4.4)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    trace = poisson("real", [(0, asked.rate), (asked.seconds, asked.rate)], asked.seed, tokens=(300, 35))
    model = ReplicaModel(PREFILL, SLOTS, 1 / RATE, kv_tokens=10**9, is_parallel=True)
    simulated = Fleet(trace, model, World(), Static(asked.replicas), asked.replicas).run().ttft_s
    with tempfile.TemporaryDirectory(prefix="hr-") as name:
        process, url = serve(Path(name), asked.replicas)
        try:
            real = asyncio.run(play(url, trace))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    print(f"{len(trace)} requests in {trace.span_s:.0f} s, {asked.replicas} replicas of {SLOTS} slots")
    print("TTFT        real  simulated  difference")
    for share in (0.5, 0.9, 0.95, 0.99):
        seen, expected = float(np.quantile(real, share)), float(np.quantile(simulated, share))
        print(f"p{100 * share:<5g} {seen:8.3f} s {expected:8.3f} s {100 * (expected / seen - 1):+8.1f} %")


if __name__ == "__main__":
    main()
