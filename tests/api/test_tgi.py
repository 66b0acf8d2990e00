"""TGI's routes, on a pod, and with its own client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient
from huggingface_hub.errors import GenerationError, ValidationError

from headrace.api.wire.tgi import TGI
from headrace.broker.errors import BadRequest
from headrace.broker.messages import JsonObject, JsonSchema, Regex
from headrace.broker.settings import ApiSettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment
from tests.workers.replicas import oracle_text


async def ask(up: Deployment, path: str = "/generate", /, **parameters: Any) -> Answer:
    return await up.ask("POST", path, json={"inputs": "hi", "parameters": parameters})


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json
    assert error.keys() == {"error", "error_type"}
    return error


def parsed(**parameters: Any) -> Any:
    return TGI("whole").parse(json.dumps({"inputs": "hi", "parameters": parameters}).encode(), ApiSettings())


async def test_h14_the_shapes(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 500.0})
    streamed, whole = await ask(up, "/generate_stream", max_new_tokens=3), await ask(up, max_new_tokens=3)
    assert whole.json == {"generated_text": oracle_text("hi", 3)}
    *tokens, last = [event.json for event in streamed.events]
    assert b"[DONE]" not in streamed.body
    assert [frame["index"] for frame in (*tokens, last)] == [1, 2, 3, 4]
    assert "".join(frame["token"]["text"] for frame in tokens) == last["generated_text"] == oracle_text("hi", 3)
    assert all(frame["generated_text"] is None and frame["details"] is None for frame in tokens)
    assert all(frame["token"]["logprob"] < 0 and frame["token"].keys() >= {"id", "special"} for frame in tokens)
    assert last["details"] == {"finish_reason": "length", "generated_tokens": 3, "seed": None, "input_length": 1}


@pytest.mark.parametrize(
    ("model", "parameters", "text", "reason"),
    [
        ({"script": ["a", "STOP", "b"]}, {}, "aSTOPb", "eos_token"),
        ({"script": ["a", "STOP", "b"]}, {"stop": ["STOP"]}, "a", "stop_sequence"),
        ({"script": ["a", "STOP", "b"]}, {"max_new_tokens": 1}, "a", "length"),
        ({}, {}, oracle_text("hi", 100), "length"),
    ],
    ids=["eos", "stop", "length", "default"],
)
async def test_h1_h2_how_a_generation_ends(
    deploy: Deploy, model: dict[str, Any], parameters: dict[str, Any], text: str, reason: str
) -> None:
    up = await deploy(model)
    whole = (await ask(up, details=True, seed=0, **parameters)).json
    last = (await ask(up, "/generate_stream", seed=0, **parameters)).events[-1].json
    assert whole["generated_text"] == last["generated_text"] == text
    for details in (whole["details"], last["details"]):
        assert (details["finish_reason"], details["seed"]) == (reason, 0)
    assert "".join(token["text"] for token in whole["details"]["tokens"]) == text
    assert whole["details"]["prefill"] == []


async def test_the_compatibility_route_answers_a_list_or_a_stream(deploy: Deploy) -> None:
    up = await deploy({"script": ["a", "b"]})
    body = {"inputs": "hi", "parameters": {"return_full_text": True, "top_n_tokens": 2}}
    assert (await up.ask("POST", "/", json=body)).json == [{"generated_text": "hiab"}]
    first, *_, last = (await up.ask("POST", "/", json={**body, "stream": True})).events
    assert last.json["generated_text"] == "hiab"
    assert [token["text"] for token in first.json["top_tokens"]] == ["a", "b"]


async def test_a8_errors_have_tgi_s_words(deploy: Deploy) -> None:
    up = await deploy({"script": ["A"], "script_end": "error", "context_tokens": 64})
    whole, streamed = await ask(up), await ask(up, "/generate_stream")
    assert (whole.status, error_of(whole)["error_type"]) == (424, "generation")
    assert streamed.events[-1].json == error_of(whole)
    assert not any(event.json.get("details") for event in streamed.events)
    for path in ("/generate", "/generate_stream", "/"):
        too_long = await up.ask("POST", path, json={"inputs": "x" * 400})
        assert (too_long.status, error_of(too_long)["error_type"]) == (422, "validation")
        for content in (b"", b"[]", b'{"inputs":', b'{"inputs":"\xff"}', b"{}", b'{"inputs":""}'):
            answer = await up.ask("POST", path, content=content)
            assert (answer.status, error_of(answer)["error_type"]) == (422, "validation")
    answer = await up.ask("POST", "/generate?model=x", json={"inputs": "hi"})
    assert (answer.status, error_of(answer)["error_type"]) == (404, "model_not_found")
    assert error_of(await up.ask("GET", "/generate"))["error_type"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"temperature": 0}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"typical_p": 0}, "typical_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x"}, "parameters.stop"),
        ({"best_of": 2}, "best_of"),
        ({"decoder_input_details": True}, "decoder_input_details"),
        ({"watermark": True}, "watermark"),
        ({"truncate": 5}, "truncate"),
        ({"adapter_id": "x"}, "adapter_id"),
        ({"top_n_tokens": 21}, "top_n_tokens"),
        ({"grammar": {"type": "banana", "value": {}}}, "grammar"),
        ({"grammar": {"type": "json", "value": "{"}}, "grammar"),
        ({"grammar": {"type": "json", "value": 5}}, "grammar"),
        ({"grammar": {"type": "regex", "value": ""}}, "grammar"),
        ({"grammar": {"type": "json_schema", "value": {}}}, "grammar"),
    ],
)
def test_h4_what_cannot_be_done_is_refused_by_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parsed(**parameters)
    assert caught.value.param == param
    assert param in json.loads(TGI().error_body(caught.value))["error"]
    assert TGI().error_status(caught.value) == 422


def test_h3_what_the_worker_is_told() -> None:
    assert parsed().job.sampling.temperature == 0.0 and parsed(do_sample=True).job.sampling.temperature == 1.0
    assert parsed(top_k=5).job.sampling.temperature == 1.0 and parsed(temperature=0.5).job.sampling.temperature == 0.5
    assert parsed(seed=0, best_of=1, watermark=False, frequency_penalty=0).job.sampling.seed == 0
    assert parsed().job.max_tokens == 100
    schema = {"properties": {"a": {"type": "string"}}}
    for type, value, constraint in (
        ("json", schema, JsonSchema(schema)),
        ("json", json.dumps(schema), JsonSchema(schema)),
        ("json_object", None, JsonObject()),
        ("json_schema", {"name": "x", "schema": schema}, JsonSchema(schema)),
        ("regex", "[a-z]+", Regex("[a-z]+")),
    ):
        assert parsed(grammar={"type": type, "value": value}).job.constraint == constraint


async def test_a_grammar_is_kept_or_refused_by_name(deploy: Deploy) -> None:
    up = await deploy()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = await ask(up, grammar={"type": "json", "value": schema}, max_new_tokens=200)
    assert isinstance(json.loads(answer.json["generated_text"])["a"], int)
    refused = await ask(up, grammar={"type": "regex", "value": "[a-z]+"})
    assert (refused.status, error_of(refused)["error_type"]) == (422, "validation")
    assert "grammar" in error_of(refused)["error"]


async def test_what_it_says_of_itself(deploy: Deploy) -> None:
    up = await deploy({"context_tokens": 64})
    info = (await up.ask("GET", "/info")).json
    assert (info["model_id"], info["max_total_tokens"], info["max_input_tokens"]) == ("scripted", 64, 63)


async def test_huggingface_hub_reads_all_of_it(deploy: Deploy) -> None:
    """Its client, with a heartbeat between any two tokens."""
    up = await deploy({"tokens_per_s": 5.0}, api={"heartbeat_s": 0.1})
    text = oracle_text("hi", 3)
    async with AsyncInferenceClient(base_url=up.pods[0].url) as client:
        assert await client.text_generation("hi", max_new_tokens=3) == text
        whole = await client.text_generation("hi", max_new_tokens=3, details=True)
        assert (whole.generated_text, whole.details.finish_reason) == (text, "length")
        parts = await client.text_generation("hi", max_new_tokens=3, stream=True)
        assert "".join([part async for part in parts]) == text
        events = [
            event async for event in await client.text_generation("hi", max_new_tokens=3, stream=True, details=True)
        ]
        assert events[-1].generated_text == text and events[-1].details.generated_tokens == 3
        chat = await client.chat_completion([{"role": "user", "content": "hi"}], model="scripted", max_tokens=3)
        assert chat.choices[0].message.content == text
        with pytest.raises(ValidationError, match="truncate"):
            await client.text_generation("hi", truncate=5)


async def test_huggingface_hub_raises_what_happened_in_the_stream(deploy: Deploy) -> None:
    up = await deploy({"script": ["A"], "script_end": "error"})
    async with AsyncInferenceClient(base_url=up.pods[0].url) as client:
        parts = await client.text_generation("hi", stream=True)
        with pytest.raises(GenerationError):
            _ = [part async for part in parts]
        with pytest.raises(GenerationError):
            await client.text_generation("hi")
