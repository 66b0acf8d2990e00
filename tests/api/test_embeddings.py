"""Embeddings: what is read, what is said, and what the official client makes of it."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import openai
import pytest
import redis
from openai.types import CreateEmbeddingResponse

from headrace.api.wire.embeddings import Embeddings
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Batch, Ended, Failure, Job, Result, Started, Text, Tokens, Usage
from headrace.broker.settings import ApiSettings
from tests.api.by_hand import HandWorker
from tests.api.conftest import Deploy
from tests.api.logs import streamed, whole
from tests.api.test_responses_client import client_of

EMBEDDINGS = Embeddings()
LIMITS = ApiSettings()
VECTORS = [(0.5, -0.25, 1.0), (0.0, 2.0, -1.5)]
DATA = {"embeddings": [struct.pack("<3f", *vector) for vector in VECTORS], "tokens": [3, 4]}
DONE = Ended("done", usage=Usage(7, 0))


def _parse(**fields: Any) -> Any:
    return EMBEDDINGS.parse(json.dumps({"model": "m", "input": "hi", **fields}).encode(), LIMITS)


def _refused(**fields: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        _parse(**fields)
    return caught.value.param


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("hi", [Text("hi")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2], [Tokens([1, 2])]),
        ([[1], [2, 3]], [Tokens([1]), Tokens([2, 3])]),
        (["a"] * 2048, [Text("a")] * 2048),
    ],
)
def test_input_has_four_forms(given: object, inputs: list[Text | Tokens]) -> None:
    assert _parse(input=given).job == Job("", "m", Batch(inputs), kind="embed")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input[0]"),
        ([], "input"),
        ([[]], "input[0]"),
        (["a", ""], "input[1]"),
        (["a", 1], "input"),
        ([[1], "a"], "input"),
        ([1, [2]], "input"),
        ([[1, -1]], "input[0]"),
        ([2**31], "input[0]"),
        (["a"] * 2049, "input"),
        (None, "input"),
        (5, "input"),
        ([True], "input"),
    ],
)
def test_other_inputs_are_refused(given: object, param: str) -> None:
    assert _refused(input=given) == param


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", None]),
        ("encoding_format", ["int8", 5]),
        ("dimensions", [0, -1, "3", 10**7]),
        ("stream", [True]),
        ("messages", [[]]),
        ("truncate_prompt_tokens", [5]),
        ("normalize", [False]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, values: list[object]) -> None:
    assert [_refused(**{name: value}) for value in values] == [name] * len(values)


def test_the_response_is_a_list_of_numbers_or_of_their_bytes() -> None:
    answer = whole("openai.embeddings", (Started(7), Result(DATA), DONE), options=_parse().options)
    CreateEmbeddingResponse.model_validate(answer, strict=True)
    assert [tuple(each["embedding"]) for each in answer["data"]] == VECTORS
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    packed = _parse(encoding_format="base64").options
    said = whole("openai.embeddings", (Started(7), Result(DATA), DONE), options=packed)["data"][0]["embedding"]
    assert isinstance(said, str)
    assert streamed("openai.embeddings", (Started(7), Result(DATA), DONE), options=_parse().options) == [answer]


def test_other_dimensions_than_the_models_are_refused_once_they_are_known() -> None:
    log = (Started(7), Result(DATA), DONE)
    assert whole("openai.embeddings", log, options=_parse(dimensions=3).options)["data"]
    with pytest.raises(BadRequest) as caught:
        whole("openai.embeddings", log, options=_parse(dimensions=2).options)
    assert caught.value.param == "dimensions"
    [frame] = streamed("openai.embeddings", log, options=_parse(dimensions=2).options)
    assert frame["error"]["param"] == "dimensions"


def test_a_job_that_failed_is_an_error_frame() -> None:
    [frame] = streamed("openai.embeddings", (Ended("failed", Failure("engine_error")),))
    assert frame["error"]["code"] == "engine_error"


async def test_the_official_client_reads_them(deploy: Deploy) -> None:
    """It asks for base64 unless it is told otherwise, and unpacks it itself."""
    deployment = await deploy(workers=0)
    worker = HandWorker(deployment)
    await worker.serve()
    async with client_of(deployment) as client:
        for fields in ({}, {"encoding_format": "float"}, {"dimensions": 3}):
            asked = client.embeddings.create(model="scripted", input=["a", "b"], **fields)
            answer, job = await asyncio.gather(asked, worker.answer(Result(DATA)))
            assert [tuple(each.embedding) for each in answer.data] == VECTORS
            assert answer.usage.prompt_tokens == 7
            assert job.prompt == Batch([Text("a"), Text("b")])
        wrong = client.embeddings.create(model="scripted", input="a", dimensions=2)
        with pytest.raises(openai.BadRequestError) as caught:
            await asyncio.gather(wrong, worker.answer(Result(DATA)))
        assert caught.value.param == "dimensions"
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="a")


async def test_the_scripted_engine_makes_them_and_other_dimensions_are_never_enqueued(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    deployment = await deploy({"dimensions": 8})
    async with client_of(deployment) as client:
        model = await client.models.retrieve("scripted")
        assert "embeddings" in model.to_dict()["capabilities"]  # type: ignore[operator]
        answer = await client.embeddings.create(model="scripted", input=["a", "b"], dimensions=8)
        assert [len(each.embedding) for each in answer.data] == [8, 8]
        before = redis_client.keys("hr:*:job:*")
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model="scripted", input="a", dimensions=7)
        assert caught.value.param == "dimensions"
        assert redis_client.keys("hr:*:job:*") == before


NOT_BODIES = [
    *(b"", b"[]", b"null", b'{"model":', b'{"model":"scripted"}', b'{"model":"scripted","input":{}}'),
    *(b'{"model":"scripted","input":"\xff"}', b'{"model":"scripted","input":"\\ud800"}', b'{"input":"a"}'),
    b'{"model":"scripted","input":' + b"[" * 500 + b"]" * 500 + b"}",
]


async def test_h4_h8_errors_are_told_by_status_in_openais_words(deploy: Deploy, redis_client: redis.Redis) -> None:
    deployment = await deploy({"context_tokens": 20})
    for content in NOT_BODIES:
        answer = await deployment.ask("POST", "/v1/embeddings", content=content)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), content
    assert not redis_client.keys("hr:*:job:*")
    long = await deployment.ask("POST", "/v1/embeddings", json={"model": "scripted", "input": ["a", "x" * 100]})
    assert (long.status, long.error["code"], long.error["param"]) == (400, "context_length_exceeded", "input")
    missing = await deployment.ask("POST", "/v1/embeddings", json={"model": "other", "input": "a"})
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    assert (await deployment.ask("GET", "/v1/embeddings")).status == 405


async def test_a_log_of_embeddings_can_be_read_again_on_another_pod(deploy: Deploy) -> None:
    deployment = await deploy(pods=2)
    made = await deployment.ask("POST", "/v1/embeddings", json={"model": "scripted", "input": "a"})
    again = await deployment.resume(made.headers["x-request-id"], pod=1)
    assert [json.loads(event.data) for event in again.events[:-1]] == [made.json]
    assert (await deployment.ask("POST", "/v1/embeddings", json={"model": "scripted", "input": "a"})).json == made.json
