"""llama.cpp's own routes, on a pod."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from headrace.api.wire import BY_NAME
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Grammar, JsonSchema, Text, Tokens
from headrace.broker.settings import ApiSettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, count
from tests.workers.replicas import oracle_text


async def ask(up: Deployment, path: str = "/completion", **body: Any) -> Answer:
    return await up.ask("POST", path, json={"prompt": "hi", **body})


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    assert answer.json.keys() == {"error"}
    error: dict[str, Any] = answer.json["error"]
    assert error["code"] == answer.status
    return error


def parsed(**body: Any) -> Any:
    return BY_NAME["llamacpp.completion"].parse(json.dumps({"prompt": "hi", **body}).encode(), ApiSettings())


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_a4_a_completion_streamed_and_whole(deploy: Deploy, path: str) -> None:
    up = await deploy({"tokens_per_s": 500.0})
    streamed, whole = await ask(up, path, stream=True, n_predict=3), await ask(up, path, n_predict=3)
    frames = [event.json for event in streamed.events]
    assert b"[DONE]" not in streamed.body
    assert [frame["stop"] for frame in frames] == [False] * 3 + [True]
    text = "".join(frame["content"] for frame in frames)
    assert text == whole.json["content"] == oracle_text("hi", 3)
    for last in (frames[-1], whole.json):
        assert (last["stop_type"], last["tokens_predicted"], last["tokens_evaluated"]) == ("limit", 3, 1)
        assert (last["model"], last["truncated"], last["generation_settings"]["n_predict"]) == ("scripted", False, 3)


@pytest.mark.parametrize(
    ("fields", "text", "stop_type", "word"),
    [
        ({}, "aSTOPb", "eos", ""),
        ({"stop": ["STOP"]}, "a", "word", "STOP"),
        ({"stop": "STOP"}, "a", "word", "STOP"),
        ({"n_predict": 1}, "a", "limit", ""),
        ({"n_predict": -1}, "aSTOPb", "eos", ""),
        ({"n_predict": 0}, "", "limit", ""),
    ],
)
async def test_b2_h1_stop_type(deploy: Deploy, fields: dict[str, Any], text: str, stop_type: str, word: str) -> None:
    up = await deploy({"script": ["a", "STOP", "b"], "tokens_per_s": 500.0})
    streamed, whole = await ask(up, stream=True, **fields), await ask(up, **fields)
    frames = [event.json for event in streamed.events]
    assert "".join(frame["content"] for frame in frames) == whole.json["content"] == text
    for last in (frames[-1], whole.json):
        assert (last["stop_type"], last["stopping_word"]) == (stop_type, word)


async def test_probabilities_and_tokens(deploy: Deploy) -> None:
    up = await deploy({"script": ["a", "b"]})
    answer = await ask(up, n_probs=2, return_tokens=True)
    assert answer.json["tokens"] == [0, 1]
    first, second = answer.json["completion_probabilities"]
    assert (first["token"], len(first["top_logprobs"]), second["bytes"]) == ("a", 2, [98])
    assert (await ask(up)).json["tokens"] == []


async def test_a8_a_failure_has_llama_server_s_words(deploy: Deploy) -> None:
    up = await deploy({"script": ["A", "B"], "script_end": "error"})
    streamed, whole = await ask(up, stream=True), await ask(up)
    *_, last = [event.json for event in streamed.events]
    assert (whole.status, error_of(whole)["type"]) == (500, "server_error")
    assert last == {"error": error_of(whole)}


async def test_h8_a_prompt_that_is_too_long_is_told_in_numbers(deploy: Deploy) -> None:
    up = await deploy({"context_tokens": 64})
    for is_stream in (False, True):
        error = error_of(await ask(up, prompt="x" * 400, stream=is_stream))
        assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == ("exceed_context_size_error", 100, 64)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"prompt_string": "x"}}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"n_predict": -2}, "n_predict"),
    ({"n_predict": "3"}, "n_predict"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"n_probs": 21}, "n_probs"),
    ({"stop": ""}, "stop"),
    ({"stop": [None]}, "stop"),
    ({"logit_bias": [["Hello", 1]]}, "logit_bias"),
    ({"logit_bias": [[1, True]]}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ({"grammar": "root ::= x", "json_schema": {}}, "grammar"),
    ({"post_sampling_probs": True}, "post_sampling_probs"),
    ({"timings_per_token": True}, "timings_per_token"),
    ({"n_discard": 5}, "n_discard"),
    ({"id_slot": 0}, "id_slot"),
    ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"mirostat": 2}, "mirostat"),
    ({"mirostat": False}, "mirostat"),
    ({"dry_multiplier": 0.5}, "dry_multiplier"),
    ({"n_cmpl": 2}, "n_cmpl"),
    ({"response_fields": ["content"]}, "response_fields"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_h4_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parsed(**fields)
    assert caught.value.param == param
    error = json.loads(BY_NAME["llamacpp.completion"].error_body(caught.value))["error"]
    assert (error["code"], error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_h3_what_the_worker_is_told() -> None:
    sampling = {
        "temperature": 0,
        "top_k": 0,
        "top_p": 0,
        "min_p": 0,
        "typical_p": 0,
        "repeat_penalty": 0,
        "repeat_last_n": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "seed": 0,
    }
    told = parsed(**sampling).job.sampling
    assert {name: getattr(told, name) for name in sampling} == sampling
    untold = parsed(**dict.fromkeys(sampling)).job.sampling
    assert untold == parsed(seed=-1).job.sampling == parsed().job.sampling
    assert all(getattr(untold, name) is None for name in sampling)
    for biases in ([[5, 1.5], ["6", False]], {"5": 1.5, "6": False}):
        assert parsed(logit_bias=biases).job.sampling.logit_bias == {5: 1.5, 6: -1e9}
    assert parsed(grammar="root ::= x").job.constraint == Grammar("root ::= x")
    assert parsed(json_schema={"type": "object"}).job.constraint == JsonSchema({"type": "object"})
    assert parsed(ignore_eos=True, cache_prompt=False).job.ignore_eos is True
    assert parsed(prompt=[1, 2]).job.prompt == parsed(prompt=[[1, 2]]).job.prompt == Tokens([1, 2])
    assert parsed(prompt=["a"]).job.prompt == Text("a")
    assert parsed(max_tokens=4).job.max_tokens == 4 and parsed(n_predict=3, max_tokens=4).job.max_tokens == 3


async def test_h4_h5_bodies_and_addresses(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy()
    for content in (b'{"model":', b"", b"[]", b'{"prompt":"\xff"}', b'{"prompt":"x","temperature":NaN}', b"{}"):
        assert error_of(await up.ask("POST", "/completion", content=content))["type"] == "invalid_request_error"
    assert error_of(await up.ask("GET", "/completion"))["type"] == "not_supported_error"
    assert error_of(await up.ask("POST", "/props", json={}))["type"] == "not_supported_error"
    assert error_of(await ask(up, model="nobody"))["type"] == "not_found_error"
    assert error_of(await up.ask("POST", "/completion?model=nobody", json={"prompt": "x"}))["code"] == 404
    assert list(redis_client.scan_iter(match="hr:{0000}:job:*")) == []
    form = {"content-type": "application/x-www-form-urlencoded"}
    answer = await up.ask("POST", "/completion", content=b'{"prompt":"hi","n_predict":1,"foo":1}', headers=form)
    assert (answer.status, answer.json["content"]) == (200, oracle_text("hi", 1))


async def test_what_the_registry_knows(deploy: Deploy) -> None:
    up = await deploy({"slots": 3, "tokens_per_s": 20.0})
    assert (await up.ask("GET", "/health")).json == {"status": "ok"}
    props = (await up.ask("GET", "/props")).json
    assert (props["total_slots"], props["model_alias"]) == (3, "scripted")
    assert props["default_generation_settings"]["n_ctx"] == 131_072
    slots = (await up.ask("GET", "/slots?model=scripted")).json
    assert [(slot["id"], slot["is_processing"]) for slot in slots] == [(0, False), (1, False), (2, False)]
    assert (await up.ask("GET", "/slots?model=x")).status == 404


async def test_health_is_bad_while_no_replica_is_ready(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    refused = count("headrace_rejections_total", reason="no_capacity")
    answer = await up.ask("GET", "/health")
    assert (answer.status, error_of(answer)["type"]) == (503, "unavailable_error")
    assert count("headrace_rejections_total", reason="no_capacity") == refused  # probes burn no error budget


def test_the_small_routes_read_their_bodies_strictly() -> None:
    def job(name: str, **body: Any) -> Any:
        return BY_NAME[f"llamacpp.{name}"].parse(json.dumps(body).encode(), ApiSettings()).job

    assert job("tokenize", content="a", add_special=True).add_special is True
    assert job("tokenize", content="a").kind == "tokenize"
    assert job("detokenize", tokens=[1]).prompt == Tokens([1])
    assert job("apply-template", messages=[{"role": "user", "content": "hi"}]).prompt.messages[0].content == "hi"
    assert job("embedding", content=["a", [1]]).prompt.inputs == [Text("a"), Tokens([1])]
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("tokenize", {}, "content"),
        ("tokenize", {"content": "a", "parse_special": False}, "parse_special"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("apply-template", {"messages": []}, "messages"),
        ("apply-template", {"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ("apply-template", {}, "messages"),
        ("embedding", {"content": ""}, "content"),
        ("embedding", {"content": "a", "embd_normalize": 0}, "embd_normalize"),
    ]
    for name, body, param in bad:
        with pytest.raises(BadRequest) as caught:
            job(name, **body)
        assert caught.value.param == param


async def test_the_small_routes_are_answered_by_a_worker(deploy: Deploy) -> None:
    up = await deploy(pods=2)
    tokenized = await up.ask("POST", "/tokenize", json={"content": "Hello world"})
    pieces = (await up.ask("POST", "/tokenize", json={"content": "Hello world", "with_pieces": True})).json["tokens"]
    assert tokenized.status == 200 and tokenized.json["tokens"] == [each["id"] for each in pieces]
    assert "".join(each["piece"] for each in pieces) == "Hello world"
    back = await up.ask("POST", "/detokenize", 1, json=tokenized.json)
    assert back.json == {"content": "Hello world"}
    prompt = await up.ask("POST", "/apply-template", json={"messages": [{"role": "user", "content": "hi"}]})
    assert "hi" in prompt.json["prompt"]
    [first, second] = (await up.ask("POST", "/embedding", json={"content": ["a", "b"]})).json
    assert (first["index"], second["index"]) == (0, 1) and first["embedding"] != second["embedding"]
    assert all(isinstance(x, float) for x in first["embedding"][0])
    again = await up.resume(tokenized.headers["x-request-id"], pod=1)
    assert [event.json for event in again.events] == [tokenized.json]
