"""`headrace serve` as a process: what it says, how it ends, and what a second start finds."""

from __future__ import annotations

import signal

import httpx
import pytest

from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, MakeMachine, alive, answers, processes_below, scripted, until
from tests.system.reading import chat, resume

BODY = {"model": "scripted", "messages": [{"role": "user", "content": "go on"}], "max_tokens": 120}
EXPECTED = "".join(f" {oracle('go on', 0, 0, index):08x}" for index in range(120))


@pytest.fixture
def machine(make_machine: MakeMachine) -> Machine:
    return make_machine({"models": [scripted(tokens_per_s=20)], "worker": {"drain_s": 1}})


def metrics_of_replicas(machine: Machine) -> list[int]:
    """The status of /metrics of each replica that Ray has placed, found as Prometheus finds it."""
    targets = httpx.get(f"{machine.urls[0]}/metrics/targets").json()
    found = [each["targets"][0] for each in targets if each["labels"]["__meta_headrace_role"] == "replica"]
    answers = [httpx.get(f"http://{location}/metrics") for location in found]
    assert all('headrace_engine_slots{model="scripted"} 64.0' in answer.text for answer in answers)
    return [answer.status_code for answer in answers]


def test_ctrl_c_drains_everything_and_a_second_start_goes_on(machine: Machine) -> None:
    process = machine.serve()
    children = processes_below(process.pid)
    assert len(children) > 5
    first = chat(machine.urls[0], BODY, stop_after=10, headers={"X-On-Disconnect": "continue"})
    assert metrics_of_replicas(machine) == [200]
    process.send_signal(signal.SIGINT)
    assert process.wait(40) == 0, machine.said()
    until(lambda: not alive(children), 10)
    assert "Traceback" not in machine.said()

    machine.serve()
    rest = resume(machine.urls[0], first)
    assert rest.is_done
    assert first.text + rest.text == EXPECTED


def test_sigkill_of_serve_leaves_nothing_running(machine: Machine) -> None:
    process = machine.serve()
    children = processes_below(process.pid)
    process.kill()
    process.wait()
    until(lambda: not alive(children), 75)


def test_a_second_serve_on_the_same_folder_says_why_it_will_not(machine: Machine) -> None:
    machine.serve()
    again = machine.run("serve", "--port", str(machine.ports[0] + 50))
    assert again.returncode == 2
    assert "another headrace serves from" in again.stderr
    assert "Traceback" not in again.stderr


def test_wrong_configurations_name_the_path_and_exit_with_2(machine: Machine) -> None:
    machine.config.write_text("models: [{name: x, engine: scripted, slotz: 3}]", "utf-8")
    answer = machine.run("serve")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "models[0]" in answer.stderr and "slotz" in answer.stderr
    machine.config.write_text("redis: {shards: nine}\nmodels: [{name: x, engine: scripted}]", "utf-8")
    for command in ("serve", "api", "worker", "status"):
        answer = machine.run(command)
        assert answer.returncode == 2
        assert "Traceback" not in answer.stderr


def test_a_port_in_use_is_said_before_anything_starts(machine: Machine) -> None:
    machine.start("api")
    until(lambda: answers(machine.urls[0], "/healthz"), 20)
    answer = machine.run("serve")
    assert answer.returncode == 2
    assert f"cannot listen on 127.0.0.1:{machine.ports[0]}" in answer.stderr


def test_a_model_that_cannot_start_is_named(make_machine: MakeMachine) -> None:
    broken = {"name": "broken", "engine": "llamacpp", "path": "/nonexistent/model.gguf"}
    machine = make_machine({"models": [scripted(), broken]})
    machine.serve()
    assert "/nonexistent/model.gguf" in machine.said()
    assert chat(machine.urls[0], {**BODY, "max_tokens": 2}).is_done
    refused = httpx.post(f"{machine.urls[0]}/v1/chat/completions", json={**BODY, "model": "broken"}, timeout=30)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_capacity")
