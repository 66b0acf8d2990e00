"""`curl -N`, as people type it: it prints what comes when it comes, and resumes with a header."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from tests.clients.deployment import CALL, LONG, WEATHER, Deployment, words

HI = [{"role": "user", "content": "hi"}]


def curl(*arguments: str, body: dict[str, Any] | None = None) -> str:
    given = ["-d", json.dumps(body)] if body else []
    done = subprocess.run(["curl", "-sN", *arguments, *given], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chunks(said: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]


def text_of(said: str) -> str:
    return "".join(choice["delta"].get("content") or "" for each in chunks(said) for choice in each["choices"])


def test_it_streams_and_resumes_on_the_other_pod(world: Deployment) -> None:
    said = curl(f"{world.url}/v1/chat/completions", body=asking("scripted", max_tokens=8))
    assert said.endswith("data: [DONE]\n\n")
    assert text_of(said) == words("hi", 8)
    ids = [line[4:] for line in said.splitlines() if line.startswith("id: ")]
    job = ids[3].partition(".")[0]
    rest = curl(f"{world.urls[1]}/v1/streams/{job}", "-H", f"Last-Event-ID: {ids[3]}")
    assert said.endswith(f"id: {ids[4]}\n" + rest.partition("\n")[2])
    assert rest.startswith(f"id: {ids[4]}\n")


def test_it_reads_one_stream_in_every_format(world: Deployment) -> None:
    job = chunks(curl(f"{world.url}/v1/chat/completions", body=asking("scripted", max_tokens=8)))[0]["id"]
    lines = curl(f"{world.urls[1]}/v1/streams/{job.rpartition('-')[2]}?format=ollama.chat").splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == words("hi", 8)


def test_it_sees_tool_calls(world: Deployment) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    deltas = [each["choices"][0]["delta"] for each in chunks(curl(chat(world), body=asking("caller", tools=tools)))]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert json.loads("".join(call.get("arguments", "") for call in calls)) == CALL["arguments"]


def test_it_is_cancelled_by_leaving(world: Deployment) -> None:
    with world.one_job("cancelled"):
        command = ["curl", "-sN", chat(world), "-d", json.dumps(asking("scripted", max_tokens=LONG))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
            assert running.stdout is not None
            running.stdout.readline()
            running.terminate()


def test_it_gets_errors_before_and_in_the_stream(world: Deployment) -> None:
    said = curl(chat(world), "-w", "\n%{http_code}", body=asking("nobody"))
    body, _, status = said.rpartition("\n")
    assert (json.loads(body)["error"]["code"], status) == ("model_not_found", "404")
    said = curl(chat(world), "-w", "%{http_code}", body=asking("broken"))
    assert said.endswith("data: [DONE]\n\n200")
    assert chunks(said)[-1]["error"]["code"] == "engine_error"


def chat(world: Deployment) -> str:
    return f"{world.url}/v1/chat/completions"


def asking(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": HI, "stream": True, **fields}
