"""H8, H11, I2: errors that are known early have a real status; n choices; whose job it is."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
import redis

from headrace.broker.settings import KeySettings
from headrace.workers.engines.scripted import oracle
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment, count
from tests.api.reading import choices, content, errors, finishes, text_of
from tests.support import eventually

routes = pytest.mark.parametrize("route", PATHS)
streams = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])


def prompt(route: str, tokens: int) -> dict[str, Any]:
    """A prompt of so many tokens, by the scripted engine's count."""
    text = "x" * 4 * tokens
    return {"messages": [{"role": "user", "content": text}]} if route == "chat" else {"prompt": text}


@routes
@streams
async def test_h8_1_an_unknown_model(deploy: Deploy, redis_client: redis.Redis, route: str, stream: bool) -> None:
    up = await deploy()
    before = count("headrace_rejections_total", reason="model_not_found")
    answer = await up.post(route, stream=stream, model="nobody\r\n")
    assert answer.status == 404
    assert (answer.error["code"], answer.error["param"]) == ("model_not_found", "model")
    assert "x-request-id" not in answer.headers
    assert count("headrace_rejections_total", reason="model_not_found") == before + 1
    assert not redis_client.keys("hr:*:job:*")


@routes
@streams
@pytest.mark.parametrize("tokens", [4096, 5000])
async def test_h8_2_4_a_prompt_that_does_not_fit(deploy: Deploy, route: str, stream: bool, tokens: int) -> None:
    up = await deploy({"context_tokens": 4096})
    answer = await up.post(route, stream=stream, **prompt(route, tokens))
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
    param = "messages" if route == "chat" else "prompt"
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", param)
    assert str(tokens) in answer.error["message"] and "4096" in answer.error["message"]
    assert answer.headers["x-request-id"]
    assert up.recorded.told == []


@routes
async def test_h8_3_an_answer_that_does_not_fit_is_shortened(deploy: Deploy, route: str) -> None:
    up = await deploy({"context_tokens": 4096})
    whole = (await up.post(route, max_tokens=200, **prompt(route, 4000))).json
    assert whole["usage"] == {
        "prompt_tokens": 4000,
        "completion_tokens": 96,
        "total_tokens": 4096,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert whole["choices"][0]["finish_reason"] == "length"
    answer = await up.stream(route, max_tokens=200, **prompt(route, 4000))
    assert (content(answer.events), finishes(answer.events)[-1]) == (text_of(whole["choices"][0]), "length")


@streams
async def test_h8_5_a_full_queue(deploy: Deploy, redis_client: redis.Redis, stream: bool) -> None:
    up = await deploy(
        {"slots": 1, "tokens_per_s": 20.0}, {"max_waiting_jobs": 1}, {"grace_s": 0, "headers_after_ms": 50}
    )
    async with up.open(max_tokens=5000), up.open() as waiting:
        await waiting.until(b"queued")
        answer = await up.post(stream=stream)
        assert (answer.status, answer.error["type"], answer.error["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert "x-request-id" not in answer.headers
        assert len(redis_client.keys("hr:*:job:*")) == 2


@routes
@streams
async def test_h8_6_no_replica(deploy: Deploy, redis_client: redis.Redis, route: str, stream: bool) -> None:
    up = await deploy(workers=0)
    answer = await up.post(route, stream=stream)
    assert (answer.status, answer.error["type"], answer.error["code"]) == (503, "server_error", "no_capacity")
    assert not redis_client.keys("hr:*:job:*")


@routes
async def test_h8_a_prompt_that_does_not_fit_is_told_in_the_stream_once_headers_are_out(
    deploy: Deploy, route: str
) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 20.0, "context_tokens": 4096}, api={"headers_after_ms": 50})
    async with up.open(max_tokens=5000) as running, up.open(route, **prompt(route, 4096)) as waiting:
        await waiting.until(b"queued")
        await up.ask("DELETE", f"/v1/streams/{running.job}")
        answer = await waiting.rest()
    [error] = errors(answer.events)
    assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
    assert content(answer.events) == ""


def tokens(choice: int, many: int) -> str:
    return "".join(f" {oracle('hi', 0, choice, index):08x}" for index in range(many))


@routes
async def test_h11_each_choice_has_its_own_text_and_end(deploy: Deploy, route: str) -> None:
    """The stop string is a token that only choice 0 makes."""
    up = await deploy({"tokens_per_s": 200.0}, pods=2)
    stop = tokens(0, 5)[-9:]
    usage: dict[str, Any] = {"stream_options": {"include_usage": True}}
    answer = await up.stream(route, n=3, max_tokens=8, stop=stop, **usage)
    whole = (await up.post(route, n=3, max_tokens=8, stop=stop)).json
    for index, (text, reason) in enumerate(
        [(tokens(0, 4), "stop"), (tokens(1, 8), "length"), (tokens(2, 8), "length")]
    ):
        assert (content(answer.events, index), finishes(answer.events, index)[-1]) == (text, reason)
        assert [bool(finish) for finish in finishes(answer.events, index)].count(True) == 1
        roles = [choice for choice in choices(answer.events, index) if "role" in choice.get("delta", {})]
        assert len(roles) == (route == "chat")
        choice = whole["choices"][index]
        assert (choice["index"], text_of(choice), choice["finish_reason"]) == (index, text, reason)
    said = answer.events[-2].json["usage"]
    assert said == whole["usage"] and (said["prompt_tokens"], said["completion_tokens"]) == (1, 5 + 8 + 8)
    job = answer.headers["x-request-id"]
    for index, event in enumerate(answer.events[:-1]):
        assert (await up.resume(job, event.id, pod=1)).events == answer.events[index + 1 :]


@routes
async def test_h11_a_cancel_ends_all_choices(deploy: Deploy, route: str) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    async with up.open(route, n=4, max_tokens=5000) as opened:
        await opened.until(b'"index":3')
        await up.ask("DELETE", f"/v1/streams/{opened.job}")
        answer = await opened.rest()
    assert [error["code"] for error in errors(answer.events)] == ["cancelled"]
    assert not any(any(finishes(answer.events, index)) for index in range(4))
    made = up.recorded.tokens
    later = await up.post(max_tokens=10)  # ten more turns of the engine, in which nobody else got a token
    assert later.status == 200 and up.recorded.tokens == made + 10


@routes
async def test_h11_n_out_of_bounds(deploy: Deploy, route: str) -> None:
    up = await deploy()
    for value in (0, 17, 129, -1, "2", 1.5):
        answer = await up.post(route, n=value)
        assert (answer.status, answer.error["param"]) == (400, "n")


async def test_every_response_that_has_a_job_names_it(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 200.0})
    streamed, whole = await up.stream(max_tokens=2), await up.post(max_tokens=2, headers={"x-request-id": "mine"})
    job = streamed.headers["x-request-id"]
    assert len({job, whole.headers["x-request-id"], "mine"}) == 3
    assert streamed.events[0].json["id"] == f"chatcmpl-{job}"
    assert whole.json["id"] == f"chatcmpl-{whole.headers['x-request-id']}"
    about: list[Answer] = [
        await up.resume(job),
        await up.resume(job, f"{job}.9-9"),
        await up.resume(job, whole.json["id"].removeprefix("chatcmpl-") + ".1-1"),
        await up.ask("GET", f"/v1/streams/{job}/status"),
        await up.ask("DELETE", f"/v1/streams/{job}"),
    ]
    assert [answer.status for answer in about] == [200, 410, 400, 200, 200]
    assert [answer.headers["x-request-id"] for answer in about] == [job] * len(about)


async def test_the_start_and_a_resume_say_when_the_job_was_made(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(pods=2)
    answer = await up.stream(max_tokens=2)
    seconds = int(redis_client.time()[0])
    assert {event.json["created"] for event in answer.events[:-1]} <= {seconds - 2, seconds - 1, seconds}
    whole = (await up.post(max_tokens=2)).json
    assert seconds <= whole["created"] <= seconds + 2


KEY = KeySettings("alice", hashlib.sha256(b"right").hexdigest())
WRONG: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer righ"},
    {"authorization": "Bearer rightx"},
    {"authorization": "Bearer"},
    {"authorization": "Basic right"},
    {"authorization": "right"},
    {"x-api-key": "righ"},
]


async def test_i2_without_the_key_nothing_is_answered(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=[KEY])
    made: list[tuple[str, str]] = [("POST", path) for path in PATHS.values()]
    made += [("GET", "/v1/models"), ("GET", f"/v1/streams/{'0' * 32}"), ("DELETE", f"/v1/streams/{'0' * 32}")]
    for headers in WRONG:
        for method, path in made:
            body = up.body("chat" if "chat" in path else "completions", stream=True) if method == "POST" else None
            answer = await up.ask(method, path, headers=headers, json=body, params={"key": "right"})
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "righ" not in answer.body.decode() and "wrong" not in answer.body.decode().split("missing or ")[0]
    assert await up.is_idle() and not redis_client.keys("hr:*:job:*") and not up.recorded.told
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await up.stream(headers={"authorization": f"{scheme} right"}, max_tokens=1)).status == 200
    assert (await up.ask("GET", "/healthz")).status == 200


async def leave(up: Deployment, headers: dict[str, str]) -> str:
    """Begin a stream, read a little, and go; the job's id."""
    request: dict[str, Any] = {"json": up.body(stream=True, max_tokens=60), "headers": headers}
    async with up.http.stream("POST", up.pods[0].url + PATHS["chat"], **request) as response:
        await anext(response.aiter_raw())
        return str(response.headers["x-request-id"])


@pytest.mark.parametrize(("asked", "state"), [("cancel", "cancelled"), ("0", "cancelled"), ("continue", "done")])
async def test_what_a_lost_client_means_is_its_own_choice(deploy: Deploy, asked: str, state: str) -> None:
    up = await deploy({"tokens_per_s": 60.0})
    job = await leave(up, {"x-on-disconnect": asked})
    await eventually(lambda: _is(up, job, state))


async def _is(up: Deployment, job: str, state: str) -> bool:
    return await up.state_of(job) == state


async def test_a_client_that_leaves_a_whole_response_cancels_it(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy({"tokens_per_s": 60.0})
    asking = asyncio.create_task(up.post(max_tokens=5000))
    await eventually(lambda: up.recorded.tokens > 2)
    asking.cancel()
    await eventually(up.is_idle)
    [name] = redis_client.keys("hr:*:job:*")
    assert isinstance(name, bytes) and await up.state_of(name.decode()[-32:]) == "cancelled"
