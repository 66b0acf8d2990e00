"""`headrace top` and `headrace status`: in a pipe, as JSON, from a pod, in a narrow terminal, with a wrong address."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import redis
from rich.console import Console

from headrace.broker.embedded import EmbeddedServer
from headrace.broker.snapshot import Snapshot
from headrace.cli import views
from tests.broker.test_verdict import QUIET, SETTINGS, late, pod, replica, seen
from tests.system.conftest import answers, free_ports, until

COMMAND = [sys.executable, "-m", "headrace.cli.main"]


@pytest.fixture
def config(tmp_path: Path, redis_server: EmbeddedServer, redis_client: redis.Redis) -> Path:
    path = tmp_path / "headrace.yaml"
    path.write_text(f"models: [{{name: m, engine: scripted}}]\nredis: {{url: '{redis_server.url}'}}\n", "utf-8")
    return path


@pytest.fixture
def url(config: Path) -> Iterator[str]:
    """A pod, as a process."""
    [port] = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([*COMMAND, "api", "--port", str(port), "--config", str(config)])
    until(lambda: answers(address), 30)
    yield address
    process.terminate()
    process.wait(20)


def run(*arguments: str, config: Path | None = None) -> subprocess.CompletedProcess[str]:
    given = ["--config", str(config)] if config else []
    env = {**os.environ, "COLUMNS": "120"}
    return subprocess.run([*COMMAND, *arguments, *given], capture_output=True, text=True, timeout=30, env=env)


def test_the_same_from_the_broker_and_from_a_pod(config: Path, url: str) -> None:
    direct, remote = run("top", "--once", "--json", config=config), run("top", "--once", "--json", "--url", url)
    one, other = json.loads(direct.stdout), json.loads(remote.stdout)
    assert one.keys() == other.keys()
    assert one["verdict"] == other["verdict"]
    assert [each["url"] for each in one["pods"]] == [each["url"] for each in other["pods"]] == [url]
    report = json.loads(run("status", "--json", config=config).stdout)
    assert report["verdict"]["state"] == "failing"
    assert [each["url"] for each in report["pods"].values()] == [url]
    assert "there is no replica" in run("status", "--url", url).stdout
    assert "there is no replica" in run("top", config=config).stdout  # a pipe is shown once
    interrupted(url)


def interrupted(url: str) -> None:
    """In a terminal it goes on until Ctrl-C, and leaves as it was asked to."""
    ours, theirs = pty.openpty()
    # where the tests run in the background, a shell has told all of them to ignore it
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        [*COMMAND, "top", "--url", url], stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=heed
    )
    os.close(theirs)
    said = b""
    deadline = time.monotonic() + 30
    while b"replica" not in said and time.monotonic() < deadline:
        said += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other side has gone
        while data := os.read(ours, 65_536):
            said += data
    assert process.wait(15) == 0
    assert b"there is no replica" in said
    assert b"Traceback" not in said
    os.close(ours)


def test_wrong_addresses_are_said_in_one_line() -> None:
    [port] = free_ports(1)
    for address in (f"http://127.0.0.1:{port}", "nonsense", "http://"):
        answer = run("top", "--once", "--url", address)
        assert (answer.returncode, answer.stdout) == (1, "")
        assert address in answer.stderr and answer.stderr.count("\n") == 1


def test_a_broker_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text("models: [{name: m, engine: scripted}]\nredis: {url: 'redis://127.0.0.1:1'}\n", "utf-8")
    answer = run("top", "--once", config=path)
    assert answer.returncode == 1
    assert "Is `headrace serve` running" in answer.stderr


def test_what_is_no_pod_is_said(url: str) -> None:
    assert httpx.get(f"{url}/ops/nothing").status_code == 404
    answer = run("status", "--url", f"{url}/nothing")
    assert answer.returncode == 1 and "Traceback" not in answer.stderr


def shown(snapshot: Snapshot, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, height=height, highlight=False, record=True, file=io.StringIO())
    console.print(views.screen(snapshot, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [38, 80, 200])
def test_it_fits_any_terminal(width: int) -> None:
    stats = {"m": QUIET}
    crowd = {f"replica-{n:03}": replica(pid=n, recent=late(3, 1.0), running="4") for n in range(100)}
    lines = shown(seen(SETTINGS, stats=stats, replicas=crowd, pods={"p": pod()}), width, 30)
    assert max(map(len, lines)) <= width
    assert len(lines) <= 30
    text = "\n".join(lines)
    assert "Strained" in text and "replicas more" in text
    assert ("TTFT p50" in text) == (width == 200)


def test_names_are_not_markup() -> None:
    about = replica(progress="[red]loading[/red] [link=x]")
    text = "\n".join(shown(seen(replicas={"[bold]r": about}), 200))
    assert "[bold]r" in text and "[red]loading[/red]" in text
