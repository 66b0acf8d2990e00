"""H1 to H5: what a request means to the engine, and that a body which means nothing gets no further than the pod."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from headrace.broker.messages import Chat, Message, Sampling, Text
from headrace.workers.engines.protocol import Generation
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment
from tests.api.reading import text_of

routes = pytest.mark.parametrize("route", PATHS)


async def told(up: Deployment, route: str = "chat", **fields: Any) -> Generation:
    """What the engine was told to do for a request."""
    answer = await up.post(route, **fields)
    assert answer.status == 200, answer.body
    return up.recorded.told[-1]


def said(answer: Answer) -> tuple[str, str]:
    [choice] = answer.json["choices"]
    return text_of(choice), choice["finish_reason"]


async def assert_refused(up: Deployment, route: str, param: str, **fields: Any) -> None:
    for stream in (True, False):
        answer = await up.post(route, **fields, stream=stream)
        assert answer.status == 400, (fields, answer.body)
        assert (answer.error["type"], answer.error["param"]) == ("invalid_request_error", param), fields


@routes
async def test_h1_both_names_of_the_limit(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["a"] * 50})
    limited: list[tuple[dict[str, Any], int]] = [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 7, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 7}, 7),
    ]
    for fields, limit in limited:
        answer = await up.post(route, **fields)
        assert said(answer) == ("a" * limit, "length")
        assert answer.json["usage"]["completion_tokens"] == limit
        assert up.recorded.told[-1].max_tokens == limit
    unlimited: list[dict[str, Any]] = [{}, {"max_tokens": None}, {"max_tokens": 10**9}]
    for fields in unlimited:
        assert said(await up.post(route, **fields)) == ("a" * 50, "stop")
    assert up.recorded.told[-2].max_tokens is None
    for name in ("max_tokens", "max_completion_tokens"):
        wrong: list[Any] = [0, -1, "3", 3.0, 3.5, 1e9, True, []]
        for value in wrong:
            await assert_refused(up, route, name, **{name: value})
    assert len(up.recorded.told) == 7


async def test_h1_a_limit_beyond_the_context_ends_with_the_context(deploy: Deploy) -> None:
    up = await deploy({"context_tokens": 20})
    assert (await up.post(max_tokens=10**9)).json["usage"]["completion_tokens"] == 19


@routes
async def test_h2_forms_of_stop(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["a", "STOP", "b"]})
    found: list[Any] = ["STOP", ["STOP"], ["x", "STOP"], ["STOP"] * 16]
    for stop in found:
        assert said(await up.post(route, stop=stop)) == ("a", "stop")
    none: list[Any] = [None, [], ...]
    for stop in none:
        assert said(await up.post(route, stop=stop)) == ("aSTOPb", "stop")
    runs = len(up.recorded.told)
    wrong: list[Any] = ["", ["", "STOP"], [None], 5, ["x"] * 17, "x" * 1_000_000]
    for stop in wrong:
        await assert_refused(up, route, "stop", stop=stop)
    assert len(up.recorded.told) == runs


ZEROS: dict[str, Any] = dict.fromkeys(("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"), 0)


@routes
async def test_h3_zero_reaches_the_engine_as_zero(deploy: Deploy, route: str) -> None:
    up = await deploy()
    logprobs = {"logprobs": True, "top_logprobs": 0} if route == "chat" else {"logprobs": 0}
    generation = await told(up, route, **ZEROS, **logprobs, n=1)
    assert generation.job.sampling == Sampling(**ZEROS)
    assert generation.job.sampling.seed is not None and generation.job.logprobs == 0
    for fields in (dict.fromkeys((*ZEROS, *logprobs, "n")), {}):
        generation = await told(up, route, **fields)
        assert (generation.job.sampling, generation.job.logprobs) == (Sampling(), None)
    texts = [said(await up.post(route, temperature=0, max_tokens=5)) for _ in range(2)]
    assert texts[0] == texts[1]
    for name, value in (("temperature", 2.1), ("temperature", -0.1), ("top_p", 1.1), ("seed", 0.5)):
        await assert_refused(up, route, name, **{name: value})


async def test_h3_every_field_reaches_the_engine(deploy: Deploy) -> None:
    up = await deploy()
    sampling: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "seed": -7,
        "frequency_penalty": -2,
        "presence_penalty": 2,
    }
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    generation = await told(up, **sampling, logit_bias={"5": -100}, messages=messages, logprobs=True, top_logprobs=3)
    assert generation.job.prompt == Chat([Message("system", "be"), Message("user", "hi")])
    assert generation.job.sampling == Sampling(**sampling, logit_bias={5: -100.0})
    assert (generation.job.logprobs, generation.choice, generation.generated) == (3, 0, [])
    assert (await told(up, "completions", prompt="once", unknown={"deep": [1]})).job.prompt == Text("once")


NOT_BODIES = [
    b'{"model":',
    b"",
    b"[]",
    b'"x"',
    b"null",
    b"\xef\xbb\xbf",
    b'{"model":"scripted","MESSAGES":"\xff"}',
    b'{"model":"scripted","MESSAGES":"x","temperature":NaN}',
    b'{"model":"scripted","MESSAGES":"x","temperature":Infinity}',
    b'{"model":"scripted"}',
    b'{"model":"scripted","MESSAGES":null}',
    b'{"model":"scripted","MESSAGES":{}}',
    b'{"model":"scripted","MESSAGES":"x"} trailing',
    b'{"model":"scripted","MESSAGES":"\\ud800"}',
    b'{"model":5,"MESSAGES":"x"}',
]


async def nothing_was_enqueued(up: Deployment, client: redis.Redis) -> bool:
    return await up.is_idle() and not client.keys("hr:*:job:*") and not up.recorded.told


@routes
async def test_h4_what_is_no_request_is_refused_in_openais_words(
    deploy: Deploy, redis_client: redis.Redis, route: str
) -> None:
    up = await deploy()
    prompt = b'[{"role":"user","content":"x"}]' if route == "chat" else b'"x"'
    for body in NOT_BODIES:
        content = body.replace(b'"MESSAGES":"x"', b'"MESSAGES":' + prompt)
        content = content.replace(b"MESSAGES", b"messages" if route == "chat" else b"prompt")
        answer = await up.ask("POST", PATHS[route], content=content)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), (content, answer.body)
        assert not any(word in answer.body.decode() for word in ("Traceback", ".py", "detail", "msgspec"))
    wrong: list[Any] = ["hi", [], [{}], [{"role": "banana", "content": "x"}], [{"role": "user"}]]
    for messages in wrong:
        answer = await up.post("chat", messages=messages)
        assert answer.status == 400 and str(answer.error["param"]).startswith("messages")
    assert await nothing_was_enqueued(up, redis_client)


async def test_h4_unknown_addresses_and_methods(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy()
    for method, path in (
        ("GET", "/v1/nope"),
        ("POST", "/v1/nope"),
        ("POST", "/nope"),
        ("GET", "/docs"),
        ("GET", "/%ff"),
    ):
        answer = await up.ask(method, path)
        assert (answer.status, answer.error["code"]) == (404, "not_found")
    for method, path, allowed in (
        ("GET", PATHS["chat"], "POST"),
        ("PUT", PATHS["completions"], "POST"),
        ("POST", "/v1/models", "GET"),
        ("BREW", "/v1/models", "GET"),
    ):
        answer = await up.ask(method, path)
        if method == "BREW":
            assert answer.status in (400, 405) and answer.error["type"] == "invalid_request_error"
        else:
            assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
            assert answer.headers["allow"] == allowed
    assert await nothing_was_enqueued(up, redis_client)


@routes
async def test_h4_unknown_and_repeated_fields_are_no_error(deploy: Deploy, route: str) -> None:
    up = await deploy()
    body = json.dumps(up.body(route, foo=1, max_tokens=2)).encode()
    answer = await up.ask("POST", PATHS[route], content=body[:-1] + b',"max_tokens":3,"foo":{"bar":[]}}')
    assert answer.json["usage"]["completion_tokens"] == 3


@routes
@pytest.mark.parametrize("stream", [True, False])
async def test_h5_the_content_type_does_not_matter(deploy: Deploy, route: str, stream: bool) -> None:
    up = await deploy()
    body = json.dumps(up.body(route, max_tokens=2, stream=stream)).encode()
    kinds = ("application/x-www-form-urlencoded", None, "text/plain", "application/json; charset=utf-8", "multipart/x")
    for kind in kinds:
        headers = {} if kind is None else {"content-type": kind}
        assert (await up.ask("POST", PATHS[route], content=body, headers=headers)).status == 200
    marked = await up.ask(
        "POST", PATHS[route], content=b"\xef\xbb\xbf" + body, headers={"content-type": "application/json"}
    )
    assert marked.status == 200
