"""The law in a real Ray Serve: up with the queue, down without a lost stream, to zero and back."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, MakeMachine, processes_below, scripted, until

SLOTS, RATE, TOKENS = 4, 20.0, 60


def model(name: str = "scripted", **autoscaling: Any) -> dict[str, object]:
    chosen = {"min_replicas": 0, "max_replicas": 3, "start_up_s": 4.0, "hold_s": 8.0, "idle_s": 8.0, **autoscaling}
    return scripted(tokens_per_s=RATE, slots=SLOTS, name=name, replicas=chosen["min_replicas"], autoscaling=chosen)


@pytest.fixture
def machine(make_machine: MakeMachine) -> Iterator[Machine]:
    yield make_machine(
        {"models": [model()], "worker": {"drain_s": 1}, "queue": {"lease_s": 2.0}, "autoscaler": {"stale_s": 4.0}}
    )


def status(machine: Machine) -> dict[str, Any]:
    answer = machine.run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    report: dict[str, Any] = json.loads(answer.stdout)
    return report


def states(machine: Machine) -> list[str]:
    return [about["state"] for about in status(machine)["replicas"].values()]


def decisions(machine: Machine) -> list[dict[str, Any]]:
    """Newest first."""
    return list(status(machine)["autoscaling"].values())


class Asking(threading.Thread):
    """One request, in a thread; `text` is what came, whole or not."""

    def __init__(self, machine: Machine, prompt: str) -> None:
        super().__init__()
        self._machine, self.prompt, self.status, self.text = machine, prompt, 0, ""
        self.start()

    def run(self) -> None:
        body = {"model": "scripted", "messages": [{"role": "user", "content": self.prompt}], "max_tokens": TOKENS}
        answer = httpx.post(f"{self._machine.urls[0]}/v1/chat/completions", json=body, timeout=90)
        self.status = answer.status_code
        self.text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else answer.text

    def check(self) -> None:
        self.join(90)
        assert self.status == 200, self.text
        assert self.text == "".join(f" {oracle(self.prompt, 0, 0, index):08x}" for index in range(TOKENS))


def test_f2_f5_from_zero_up_with_the_queue_and_back_to_zero_with_every_stream_whole(machine: Machine) -> None:
    machine.serve()
    assert states(machine) == []
    first = Asking(machine, "the first")
    first.check()
    assert any(each["decision"] == "up 0 to 1" and each["reason"] == "wake" for each in decisions(machine))

    many = [Asking(machine, f"one of many {number}") for number in range(72)]
    until(lambda: states(machine).count("ready") >= 2, 60)
    for asking in many:
        asking.check()
    late = [Asking(machine, f"late {number}") for number in range(3)]
    until(lambda: len(states(machine)) <= 1, 60)  # replicas are given up while these run, or soon after
    for asking in late:
        asking.check()
    until(lambda: states(machine) == [], 60)
    assert any(each["decision"] == "down 1 to 0" and each["reason"] == "idle" for each in decisions(machine))
    again = Asking(machine, "again")
    again.check()
    metrics = httpx.get(f"{machine.urls[0]}/metrics").text
    assert 'headrace_autoscaler_decisions_total{direction="up",model="scripted",reason="wake"}' in metrics
    assert "Traceback" not in machine.said()


def test_f1_without_signals_and_after_a_restart_of_the_controller_the_number_holds(make_machine: MakeMachine) -> None:
    held = model(min_replicas=0, max_replicas=4, hold_s=1000.0, idle_s=1000.0)
    machine = make_machine(
        {
            "models": [{**held, "replicas": 2}],
            "queue": {"lease_s": 2.0},
            "autoscaler": {"stale_s": 2.0, "period_s": 0.5},
        }
    )
    process = machine.serve()
    until(lambda: states(machine).count("ready") == 2, 30)
    replicas = set(status(machine)["replicas"])
    [broker] = machine.pids("broker")
    os.kill(broker, signal.SIGSTOP)
    try:
        threading.Event().wait(4)  # longer than the signals may be old
    finally:
        os.kill(broker, signal.SIGCONT)
    until(lambda: any(each["reason"] == "stale" for each in decisions(machine)), 30)

    [controller] = [each for each in processes_below(process.pid) if "ServeController" in " ".join(each.cmdline())]
    controller.kill()
    known = len(decisions(machine))
    until(lambda: decisions(machine)[0]["ago_s"] < 30 and len(decisions(machine)) > known, 60)
    until(lambda: states(machine).count("ready") == 2, 30)
    assert {each["decision"] for each in decisions(machine)} == {"hold 2"}
    assert set(status(machine)["replicas"]) == replicas
