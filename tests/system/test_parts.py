"""The parts as single processes, without Ray: pods and workers that are killed and paused."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest
import yaml

from headrace.broker.embedded import EmbeddedServer
from headrace.workers.engines.scripted import oracle
from tests.system.conftest import Machine, MakeMachine, answers, free_ports, scripted, until
from tests.system.reading import Cut, chat, resume, until_broken

LEASE_S = 1.0
BODY = {"model": "scripted", "messages": [{"role": "user", "content": "parts"}], "max_tokens": 100}
EXPECTED = "".join(f" {oracle('parts', 0, 0, index):08x}" for index in range(100))


@pytest.fixture
def machine(make_machine: MakeMachine) -> Iterator[Machine]:
    """A broker and one pod; the tests start the workers."""
    settings = {"models": [scripted(tokens_per_s=40)], "queue": {"lease_s": LEASE_S}}
    machine = make_machine(settings)
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder))
        runner.run(server.start())
        machine.start("api")
        until(lambda: answers(machine.urls[0]), 20)
        yield machine
        machine.end()
        runner.run(server.stop())


def _wait_for_replicas(machine: Machine, count: int) -> None:
    until(lambda: len(machine.pids("replica")) == count, 30)


def test_without_a_worker_a_request_is_refused_at_once(machine: Machine) -> None:
    answer = httpx.post(f"{machine.urls[0]}/v1/chat/completions", json={**BODY, "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_capacity")


def test_e1_a_worker_killed_with_nobody_to_take_over_ends_the_stream_with_an_error(machine: Machine) -> None:
    worker = machine.start("worker")
    _wait_for_replicas(machine, 1)
    first = chat(machine.urls[0], BODY, stop_after=5)
    worker.send_signal(signal.SIGKILL)
    rest = resume(machine.urls[0], first)
    assert rest.is_done
    assert rest.events[-2].data["error"]["code"] == "no_capacity"  # type: ignore[index]
    assert EXPECTED.startswith(first.text + rest.text)


def test_e2_a_killed_workers_jobs_go_on_exactly_at_another(machine: Machine) -> None:
    workers = [machine.start("worker") for _ in range(2)]
    _wait_for_replicas(machine, 2)
    cuts = [chat(machine.urls[0], BODY, stop_after=4 + index) for index in range(4)]
    workers[0].send_signal(signal.SIGKILL)
    for first in cuts:
        rest = resume(machine.urls[0], first)
        assert rest.is_done
        assert first.text + rest.text == EXPECTED


def test_e3_a_worker_paused_past_its_lease_writes_nothing_when_it_wakes(machine: Machine) -> None:
    zombie = machine.start("worker")
    _wait_for_replicas(machine, 1)
    first = chat(machine.urls[0], BODY, stop_after=4)
    zombie.send_signal(signal.SIGSTOP)
    machine.start("worker")
    rest = resume(machine.urls[0], first)
    zombie.send_signal(signal.SIGCONT)
    assert rest.is_done
    assert first.text + rest.text == EXPECTED
    again = resume(machine.urls[0], Cut(first.job, []))
    assert again.text == EXPECTED
    assert zombie.poll() is None


def test_sigterm_hands_running_jobs_to_another_worker(machine: Machine) -> None:
    machine.config.write_text(machine.config.read_text("utf-8") + "\nworker: {drain_s: 0}\n", "utf-8")
    leaving = machine.start("worker")
    _wait_for_replicas(machine, 1)
    first = chat(machine.urls[0], BODY, stop_after=4)
    machine.start("worker")
    _wait_for_replicas(machine, 2)
    leaving.send_signal(signal.SIGTERM)
    rest = resume(machine.urls[0], first)
    assert first.text + rest.text == EXPECTED
    assert leaving.wait(20) == 0


def test_e3_a_job_that_hangs_every_engine_is_a_dead_letter_and_the_workers_recover(machine: Machine) -> None:
    settings = {
        "models": [scripted(tokens_per_s=0.05)],  # after its first token it is silent for 20 s
        "queue": {"lease_s": LEASE_S},
        "worker": {"step_timeout_s": 1.0},
    }
    machine.config.write_text(yaml.safe_dump(settings), "utf-8")
    workers = [machine.start("worker") for _ in range(4)]
    _wait_for_replicas(machine, 4)
    answers: list[httpx.Response] = []
    url = f"{machine.urls[0]}/v1/chat/completions"
    asking = threading.Thread(target=lambda: answers.append(httpx.post(url, json=BODY, timeout=30)))
    asking.start()
    asking.join(30)
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (500, "too_many_deaths")
    until(lambda: [worker.poll() for worker in workers].count(1) == 3, 20)
    [alive] = [worker for worker in workers if worker.poll() is None]

    job = answers[0].headers["x-request-id"]
    [letter] = json.loads(machine.run("jobs", "dead", "--json").stdout)
    assert (letter["id"], letter["model"], letter["owner"], letter["deaths"]) == (job, "scripted", "anonymous", 3)
    assert letter["error"] == "engine_hung"
    requeued = machine.run("jobs", "requeue", job).stdout.strip()
    assert json.loads(machine.run("jobs", "show", requeued).stdout)["state"] in ("waiting", "running")
    assert machine.run("jobs", "dead").stdout == "no dead letters\n"
    assert alive.wait(20) == 1  # the poison is back


def test_a_worker_that_starts_before_its_broker_waits_for_it(make_machine: MakeMachine) -> None:
    machine = make_machine({"models": [scripted()], "queue": {"lease_s": LEASE_S}})
    worker = machine.start("worker")
    until(lambda: "the broker does not answer" in machine.said(), 20)
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder))
        runner.run(server.start())
        _wait_for_replicas(machine, 1)
        assert machine.said().count("the broker does not answer, for 0 s now") == 1
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
        runner.run(server.stop())


def test_f5_a_pod_that_is_told_to_end_lets_its_clients_go_on_at_another(machine: Machine) -> None:
    machine.start("worker")
    _wait_for_replicas(machine, 1)
    machine.config.write_text(machine.config.read_text("utf-8") + "\napi: {drain_s: 1, grace_s: 0}\n", "utf-8")
    [port] = free_ports(1)
    leaving, url = machine.start("api", "--port", str(port)), f"http://127.0.0.1:{port}"
    until(lambda: answers(url), 20)
    timer = threading.Timer(0.3, leaving.send_signal, (signal.SIGTERM,))
    timer.start()
    seen: list[Cut] = []
    with pytest.raises(httpx.RemoteProtocolError):
        until_broken(url, BODY, seen, {"X-On-Disconnect": "cancel"})
    assert not seen[0].is_done
    assert not answers(url)
    rest = resume(machine.urls[0], seen[0])
    assert rest.is_done
    assert seen[0].text + rest.text == EXPECTED
    leaving.wait(20)
    assert "Traceback" not in machine.said()
    assert "without completing" not in machine.said()
