"""Real processes: `headrace serve` as a user starts it, and its parts alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec
import psutil
import pytest
import yaml

from headrace.broker import embedded
from headrace.broker.settings import Settings

T = TypeVar("T")

REPO = Path(__file__).parents[2]
VLLM_PYTHON = Path(os.environ.get("HEADRACE_VLLM_PYTHON", REPO / ".venv-vllm" / "bin" / "python"))
"""The interpreter that has vLLM, as `make setup-vllm` builds it."""

MODELS = Path(os.environ.get("HEADRACE_TEST_DATA", REPO / ".headrace")) / "models"
"""Where the real model is kept between runs, so that it is fetched once."""


def until(condition: Callable[[], T], within_s: float) -> T:
    """Ask until the answer is true, and return it."""
    deadline = time.monotonic() + within_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s} s")
        time.sleep(0.05)
    return answer


def answers(url: str, path: str = "/readyz") -> bool:
    """Does a pod answer this probe with 200?"""
    try:
        return httpx.get(url + path, timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def free_ports(count: int) -> list[int]:
    """Neighbouring ports that nobody listens on."""
    for first in range(20_000 + os.getpid() % 10_000, 60_000, count):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise AssertionError("no free ports")


class Machine:
    """A data folder, a configuration, and the headrace processes that a test starts on them."""

    def __init__(
        self, folder: Path, settings: dict[str, object], pods: int = 1, python: Path = Path(sys.executable)
    ) -> None:
        self.folder = folder
        self.python = str(python)
        self.ports = free_ports(pods)
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.config = folder / "headrace.yaml"
        self._settings: dict[str, object] = {}
        self.configure(settings)
        self.started: list[subprocess.Popen[str]] = []
        MODELS.mkdir(parents=True, exist_ok=True)
        (folder / "models").symlink_to(MODELS)

    def configure(self, changes: dict[str, object]) -> None:
        """Write the configuration file, with these sections in place of those that it has."""
        self._settings.update(changes)
        written = self.config.with_suffix(".new")
        written.write_text(yaml.safe_dump(self._settings), "utf-8")
        written.replace(self.config)

    @property
    def broker_url(self) -> str:
        return embedded.url(str(self.folder), "ops")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`headrace <arguments> --config ...`, its output in a file that `said` reads."""
        with (self.folder / f"{arguments[0]}-{len(self.started)}.log").open("w") as log:
            process = subprocess.Popen(
                [self.python, "-m", "headrace.cli.main", *arguments, "--config", str(self.config)],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                env=self.env(),
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def env(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        return {**clean, "HEADRACE_DATA": str(self.folder), "HEADRACE_PORT": str(self.ports[0])}

    def said(self) -> str:
        return "\n".join(log.read_text("utf-8") for log in sorted(self.folder.glob("*.log")))

    def serve(self, within_s: float = 120.0) -> subprocess.Popen[str]:
        """`headrace serve` on all ports, once it has said that it is ready."""
        process = self.start("serve", "--pods", str(len(self.ports)))
        log = self.folder / f"serve-{len(self.started) - 1}.log"
        until(lambda: "stop with Ctrl-C" in log.read_text("utf-8") or process.poll() is not None, within_s)
        assert process.poll() is None, self.said()
        return process

    def run(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself."""
        return subprocess.run(
            [self.python, "-m", "headrace.cli.main", *arguments, "--config", str(self.config)],
            capture_output=True,
            text=True,
            env=self.env(),
            timeout=timeout_s,
        )

    def pids(self, role: str) -> list[int]:
        """What `headrace status --json` says of this host's processes."""
        answer = self.run("status", "--json")
        assert answer.returncode == 0, answer.stderr
        report = msgspec.json.decode(answer.stdout)
        return [each["pid"] for each in report["processes"] if each["role"] == role]

    def pid_at(self, port: int) -> int:
        """The pod process that serves this port, by the argument that names its socket."""
        with httpx.Client() as client:
            answer = client.get(f"http://127.0.0.1:{port}/metrics")
        assert answer.status_code == 200
        [pid] = [int(about["pid"]) for about in self._pods().values() if about["url"] == f"http://127.0.0.1:{port}"]
        return pid

    def _pods(self) -> dict[str, dict[str, str]]:
        answer = self.run("status", "--json")
        pods: dict[str, dict[str, str]] = msgspec.json.decode(answer.stdout)["pods"]
        return {pod: about for pod, about in pods.items() if psutil.pid_exists(int(about["pid"]))}

    def end(self) -> None:
        """End what is still there of the processes that were started here, and what they started."""
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                process.kill()
                process.wait()


MakeMachine = Callable[..., Machine]


def machines() -> Iterator[MakeMachine]:
    """Machines in short folders (unix sockets lie in them), all ended at the end: each costs a tenth of a core."""
    made: list[Machine] = []

    def make(settings: dict[str, object], pods: int = 1, **more: Path) -> Machine:
        machine = Machine(Path(tempfile.mkdtemp(prefix="hr-")), settings, pods, **more)
        made.append(machine)
        return machine

    yield make
    for machine in made:
        machine.end()
        shutil.rmtree(machine.folder)


make_machine = pytest.fixture(scope="module")(machines)


def scripted(*, tokens_per_s: float = 50.0, slots: int = 64, **fields: object) -> dict[str, object]:
    """One model `scripted` in a configuration."""
    return {
        "name": "scripted",
        "engine": "scripted",
        "tokens_per_s": tokens_per_s,
        "slots": slots,
        "cpus": 0.1,
        **fields,
    }


def real_model() -> dict[str, object]:
    """The default model, as the shipped configuration has it, with small limits."""
    shipped = yaml.safe_load((REPO / "headrace.yaml").read_text("utf-8"))
    return {**shipped["models"][0], "context_tokens": 512, "slots": 2, "threads": 1}


def vllm_model() -> dict[str, object]:
    """The same weights on vLLM, as the example configuration has them, with small limits."""
    example = yaml.safe_load((REPO / "examples" / "vllm-cpu.yaml").read_text("utf-8"))
    template = str(REPO / example["models"][0]["chat_template"])
    return {**example["models"][0], "context_tokens": 512, "slots": 2, "chat_template": template}


def need_vllm() -> None:
    """Where vLLM is not installed its tests are skipped; in CI they fail."""
    if not VLLM_PYTHON.exists():
        reason = f"{VLLM_PYTHON} is not there: run `make setup-vllm`"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def processes_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


__all__ = [
    "REPO",
    "VLLM_PYTHON",
    "Machine",
    "MakeMachine",
    "Settings",
    "alive",
    "free_ports",
    "need_vllm",
    "processes_below",
    "real_model",
    "scripted",
    "until",
    "vllm_model",
]
