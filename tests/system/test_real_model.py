"""The whole path as a newcomer has it: `headrace serve --pods 2`, Ray Serve, a real model on each engine, Valkey."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from openai import OpenAI

from tests.system.conftest import (
    VLLM_PYTHON,
    Machine,
    MakeMachine,
    alive,
    answers,
    need_vllm,
    processes_below,
    real_model,
    until,
    vllm_model,
)
from tests.system.reading import DONE, Cut, chat, resume, until_broken

MODEL = "smollm2-135m-instruct"
FRANCE = {"model": MODEL, "temperature": 0, "messages": [{"role": "user", "content": "The capital of France is"}]}
STORY = {
    "model": MODEL,
    "temperature": 0,
    "max_tokens": 48,
    "messages": [{"role": "user", "content": "Write a short story about a mill, a river and two 🐑."}],
}


@pytest.fixture(scope="module", params=["llamacpp", "vllm"])
def machine(request: pytest.FixtureRequest, make_machine: MakeMachine) -> Iterator[Machine]:
    if request.param == "vllm":
        need_vllm()
        machine = make_machine({"models": [{**vllm_model(), "name": MODEL}]}, pods=2, python=VLLM_PYTHON)
    else:
        machine = make_machine({"models": [real_model()]}, pods=2)
    machine.serve(within_s=300)
    yield machine
    machine.end()


@pytest.fixture(scope="module")
def story(machine: Machine) -> Cut:
    """One undisturbed answer; at temperature 0 its log is what every reader must get."""
    return chat(machine.urls[0], STORY)


def test_a_prompt_that_was_read_before_is_told_as_cached(machine: Machine) -> None:
    """In the usage of OpenAI's format and of Anthropic's, whichever pod is asked."""
    turn = {"role": "user", "content": "the mill and the river " * 20}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 2, "messages": [turn]}
    httpx.post(f"{machine.urls[0]}/v1/chat/completions", json=body, timeout=60)
    chat_usage = httpx.post(f"{machine.urls[1]}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    usage = httpx.post(f"{machine.urls[0]}/v1/messages", json=body, timeout=60).json()["usage"]
    cached = chat_usage["prompt_tokens_details"]["cached_tokens"]
    assert 0.5 * chat_usage["prompt_tokens"] < cached < chat_usage["prompt_tokens"]
    assert usage["cache_read_input_tokens"] == cached
    assert usage["input_tokens"] == chat_usage["prompt_tokens"] - cached


def whole_text(machine: Machine, job: str) -> str:
    """The text of a job's log, read from its start."""
    return resume(machine.urls[0], Cut(job, [])).text


def test_a_newcomers_curl_gets_paris(machine: Machine) -> None:
    answer = httpx.post(f"{machine.urls[0]}/v1/chat/completions", json=FRANCE, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]


def test_the_official_sdk_streams_paris(machine: Machine) -> None:
    with OpenAI(base_url=f"{machine.urls[1]}/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(**FRANCE, stream=True)  # type: ignore[call-overload]
        assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 21, 34])
def test_a_stream_cut_on_one_pod_goes_on_at_the_other(machine: Machine, count: int) -> None:
    first = chat(machine.urls[0], STORY, stop_after=count)
    rest = resume(machine.urls[1], first)
    assert rest.is_done
    assert first.text + rest.text == whole_text(machine, first.job)
    positions = [event.position for event in (*first.events, *rest.events) if event.position]
    assert len(positions) == len(set(positions))


def test_an_ended_stream_is_read_again_from_any_position(machine: Machine, story: Cut) -> None:
    for count in range(1, len(story.events), 7):
        part = Cut(story.job, story.events[:count])
        rest = resume(machine.urls[1], part)
        assert part.text + rest.text == story.text
        assert rest.events == story.events[count:]
    assert [event.data for event in resume(machine.urls[1], story).events] == [DONE]


def test_two_readers_at_once_get_the_same(machine: Machine) -> None:
    first = chat(machine.urls[0], STORY, stop_after=4)
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda url: resume(url, first), machine.urls)
    assert one.events == two.events
    assert first.text + one.text == whole_text(machine, first.job)


def test_foreign_and_malformed_ids_are_404_and_400(machine: Machine, story: Cut) -> None:
    url = machine.urls[0]
    assert httpx.get(f"{url}/v1/streams/{'0' * 32}").status_code == 404
    assert httpx.get(f"{url}/v1/streams/nonsense").status_code == 400
    assert httpx.get(f"{url}/v1/streams/{'f' * 32}").status_code == 400
    for position in ("abc", "-1", "9999999999999-0", f"{story.job}.x-1", "9" * 1000):
        answer = httpx.get(f"{url}/v1/streams/{story.job}", headers={"Last-Event-ID": position})
        assert answer.status_code == 400, position
        assert answer.json()["error"]["type"] == "invalid_request_error"
    foreign = {"Last-Event-ID": f"{'0' * 32}.1-1"}
    assert httpx.get(f"{url}/v1/streams/{story.job}", headers=foreign).status_code == 400


def test_a_cancel_ends_the_stream_with_an_error_and_frees_the_slot(machine: Machine) -> None:
    started = chat(machine.urls[0], {**STORY, "max_tokens": 400}, stop_after=3)
    assert httpx.delete(f"{machine.urls[1]}/v1/streams/{started.job}").json()["cancelled"]
    rest = resume(machine.urls[0], started)
    assert rest.is_done
    assert '"code": "cancelled"' in str(rest.events[-2].data).replace("'", '"')
    assert whole_text(machine, chat(machine.urls[0], FRANCE).job).strip()


def test_a_pod_killed_in_the_middle_loses_nothing(machine: Machine) -> None:
    url = machine.urls[0]
    pid = machine.pid_at(machine.ports[0])
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    seen: list[Cut] = []
    with pytest.raises(httpx.RemoteProtocolError):
        until_broken(url, {**STORY, "max_tokens": 200}, seen)
    killer.join()
    rest = resume(machine.urls[1], seen[0])
    assert rest.is_done
    assert seen[0].text + rest.text == resume(machine.urls[1], Cut(rest.job, [])).text
    until(lambda: answers(url), 30)
    assert machine.pid_at(machine.ports[0]) != pid


def test_a_replica_killed_in_the_middle_leaves_no_reader_hanging(machine: Machine) -> None:
    first = chat(machine.urls[0], {**STORY, "max_tokens": 150}, stop_after=5)
    [pid] = machine.pids("replica")
    children = processes_below(pid)
    os.kill(pid, signal.SIGKILL)
    rest = resume(machine.urls[1], first)
    until(lambda: not alive(children), 10)
    assert rest.is_done
    assert not [event for event in rest.events if isinstance(event.data, dict) and "error" in event.data]
    assert first.text + rest.text == whole_text(machine, first.job)
    positions = [event.position for event in (*first.events, *rest.events) if event.position]
    assert len(positions) == len(set(positions))
    assert any(position.split(".")[1].startswith("2-") for position in positions), "nobody took the job over"


def test_the_broker_killed_in_the_middle_comes_back_with_its_log(machine: Machine) -> None:
    first = chat(machine.urls[0], {**STORY, "max_tokens": 150}, stop_after=5)
    [pid] = machine.pids("broker")
    os.kill(pid, signal.SIGKILL)
    until(lambda: answers(machine.urls[1]) and machine.pids("broker") != [pid], 30)
    rest = resume(machine.urls[1], first)
    assert rest.is_done
    assert first.text + rest.text == whole_text(machine, first.job)
