"""Models on a Ray cluster of several nodes: each where it fits; a killed node, a hung engine, no place."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, MakeMachine, scripted, until
from tests.system.reading import Cut, chat

T4, A100 = {"accelerator_type:T4": 1}, {"accelerator_type:A100": 1}
NODES: dict[str, dict[str, Any]] = {
    "large": {"num_cpus": 1, "num_gpus": 2, "resources": A100},
    "small-1": {"num_cpus": 1, "num_gpus": 1, "resources": T4},
    "small-2": {"num_cpus": 1, "num_gpus": 1, "resources": T4},
}
START_S = 120.0
HANGS_AFTER = 30


def model(name: str, **fields: Any) -> dict[str, object]:
    return {**scripted(tokens_per_s=20.0, slots=16), "name": name, "cpus": 0.05, **fields}


MODELS = [
    model("small", gpus=1, accelerator="T4", replicas=2),
    model("wide", gpus=2, accelerator="A100", tensor_parallel=2),
    model("staged", pipeline_parallel=2, strategy="STRICT_SPREAD"),
    model("huge", gpus=8),
    model("hanging", hang_after_tokens=HANGS_AFTER),
]


class Ray:
    """The nodes of `ray_nodes.py`."""

    def __init__(self, env: dict[str, str]) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.system.ray_nodes", json.dumps(NODES)]
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        self.address = ""
        self.nodes: dict[str, str] = {}

    def _listen(self) -> None:
        assert self._process.stdout is not None
        said = json.loads(self._process.stdout.readline())
        self.address, self.nodes = said["address"], said["nodes"]

    def start(self) -> None:
        """Returns once all nodes are there."""
        self._listen()

    def tell(self, *words: str) -> None:
        """Returns once it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        self._listen()

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def ray() -> Iterator[Ray]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HEADRACE_"))}
    own = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray keep to 127.0.0.1
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_initial_delay_ms": "500",
    }
    with TemporaryDirectory(prefix="hr-ray-", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "ray").mkdir()  # where Ray notes its cluster, in place of a file that all users share
        for name, value in {**own, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        ray = Ray({**env, **own, "RAY_TMPDIR": folder})
        try:
            ray.start()
            yield ray
        finally:
            ray.end()


@pytest.fixture(scope="module")
def machine(make_machine: MakeMachine, ray: Ray) -> Machine:
    machine = make_machine(
        {
            "models": MODELS,
            "ray": {"address": ray.address, "placement_s": 0.5},
            "worker": {"drain_s": 1, "step_timeout_s": 2.0},
            "queue": {"lease_s": 2.0},
        }
    )
    try:
        machine.serve(START_S)
    except AssertionError as error:
        raise AssertionError(machine.said()[-4000:]) from error
    return machine


def status(machine: Machine) -> dict[str, Any]:
    answer = machine.run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    return report


def nodes_of(machine: Machine, model: str) -> list[str]:
    """The nodes of its replicas that are ready."""
    replicas = status(machine)["replicas"].values()
    return sorted(each["node"] for each in replicas if each["model"] == model and each["state"] == "ready")


class Streaming(threading.Thread):
    """One stream, read in a thread to its end."""

    def __init__(self, machine: Machine, model: str, prompt: str, tokens: int) -> None:
        super().__init__()
        self._url, self._prompt, self._tokens = machine.urls[0], prompt, tokens
        self._body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
        self.cut: Cut | None = None
        self.start()

    def run(self) -> None:
        self.cut = chat(self._url, self._body)

    def check(self) -> None:
        """It is whole, and what the oracle says; a stream that ended in an error has another last event."""
        self.join(60)
        assert self.cut is not None and self.cut.is_done, self.cut
        assert self.cut.text == "".join(f" {oracle(self._prompt, 0, 0, index):08x}" for index in range(self._tokens))


def test_models_lie_on_the_nodes_that_have_what_they_need(machine: Machine, ray: Ray) -> None:
    assert nodes_of(machine, "small") == sorted([ray.nodes["small-1"], ray.nodes["small-2"]])
    assert nodes_of(machine, "wide") == [ray.nodes["large"]]
    assert len(nodes_of(machine, "staged")) == 1
    for name in ("small", "wide", "staged"):
        Streaming(machine, name, "where", 3).check()


def test_a_model_without_a_place_is_refused_with_the_reason_and_disturbs_nobody(machine: Machine) -> None:
    why = "this model cannot be placed: no node has 8 GPUs and 0.05 CPU"
    message = {"role": "user", "content": "hi"}
    body = {"model": "huge", "messages": [message], "max_tokens": 3, "stream": True}
    openai = httpx.post(f"{machine.urls[0]}/v1/chat/completions", json=body)
    assert (openai.status_code, openai.json()["error"]["code"]) == (503, "no_capacity")
    assert openai.json()["error"]["message"] == why
    assert int(openai.headers["retry-after"]) > 0
    anthropic = httpx.post(f"{machine.urls[0]}/v1/messages", json=body)
    assert (anthropic.status_code, anthropic.json()["error"]["message"]) == (503, why)
    problems = {name: each["problem"] for name, each in status(machine)["models"].items()}
    assert problems == {"small": "", "wide": "", "staged": "", "huge": why, "hanging": ""}
    assert why in " ".join(machine.said().split())
    Streaming(machine, "small", "undisturbed", 3).check()


def test_an_engine_that_hangs_is_replaced_and_its_job_goes_on(machine: Machine) -> None:
    [before] = [id for id, each in status(machine)["replicas"].items() if each["model"] == "hanging"]
    Streaming(machine, "hanging", "hang", 2 * HANGS_AFTER - 10).check()
    after = [id for id, each in status(machine)["replicas"].items() if each["model"] == "hanging"]
    assert len(after) == 1 and after != [before]


def test_a_model_that_changes_is_updated_under_its_streams_and_others_are_left_alone(machine: Machine) -> None:
    wide = [id for id, each in status(machine)["replicas"].items() if each["model"] == "wide"]
    old = {id for id, each in status(machine)["replicas"].items() if each["model"] == "small"}
    streams = [Streaming(machine, "small", f"update {number}", 100) for number in range(8)]
    until(lambda: status(machine)["models"]["small"]["running"] == len(streams), 30)
    changed = [{**each, "slots": 17} if each["name"] == "small" else each for each in MODELS]
    machine.configure({"models": [each for each in changed if each["name"] != "staged"] + [model("added")]})
    for stream in streams:
        stream.check()

    def is_updated() -> bool:
        replicas = {id: each for id, each in status(machine)["replicas"].items() if each["model"] == "small"}
        return (
            len(replicas) == 2 and not old & replicas.keys() and {each["slots"] for each in replicas.values()} == {17}
        )

    until(is_updated, 60)
    until(lambda: nodes_of(machine, "added"), 60)
    Streaming(machine, "added", "new", 3).check()
    assert [id for id, each in status(machine)["replicas"].items() if each["model"] == "wide"] == wide
    body = {"model": "staged", "messages": [{"role": "user", "content": "hi"}]}
    assert httpx.post(f"{machine.urls[0]}/v1/chat/completions", json=body).status_code == 404


def test_a_node_that_is_killed_takes_no_stream_with_it_and_another_takes_its_place(machine: Machine, ray: Ray) -> None:
    lost, kept = ray.nodes["small-2"], ray.nodes["small-1"]
    streams = [Streaming(machine, "small", f"stream {number}", 80) for number in range(8)]

    def are_all_running() -> bool:
        found = {
            each["node"]: int(each["running"])
            for each in status(machine)["replicas"].values()
            if each["model"] == "small"
        }
        return sum(found.values()) == len(streams) and found.get(lost, 0) > 0

    until(are_all_running, 30)
    ray.tell("kill", "small-2")
    for stream in streams:
        stream.check()
    assert nodes_of(machine, "small") == [kept]
    ray.tell("add", "small-3", json.dumps(NODES["small-2"]))
    until(lambda: nodes_of(machine, "small") == sorted([kept, ray.nodes["small-3"]]), 60)
    Streaming(machine, "small", "again", 3).check()
