"""The cases of kinds A, B, C, E and H on the route that says things in its own words."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
import redis

from headrace.broker.errors import BadRequest
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, Opened, RecordingEngine
from tests.api.test_openai_laws import read
from tests.api.test_responses_client import client_of
from tests.support import eventually

PATH = "/v1/responses"
_BEAT = re.compile(rb"(?m)^: [^\n]*\n")


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "scripted", "input": "hi", **fields}


async def post(up: Deployment, pod: int = 0, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return await up.ask("POST", PATH, pod, json=body(**fields), headers=headers)


async def stream(up: Deployment, **fields: Any) -> Answer:
    return await post(up, stream=True, **fields)


def events(answer: Answer) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "text/event-stream"
    return read(_BEAT.sub(b"", answer.body))


def ids(answer: Answer) -> list[str]:
    return [found.decode() for found in re.findall(rb"(?m)^id: (.*)$", answer.body)]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


class Open:
    """A stream that the test reads itself, and may leave."""

    def __init__(self, up: Deployment, **fields: Any) -> None:
        self._asked = up.http.stream("POST", up.pods[0].url + PATH, json=body(stream=True, **fields))

    async def __aenter__(self) -> Opened:
        return Opened(await self._asked.__aenter__())

    async def __aexit__(self, *what: Any) -> None:
        await self._asked.__aexit__(*what)


SPLIT: list[Any] = [[0xF0, 0x9F], [0x98], [0x80], " ok", [0xE6, 0xAD], [0xAA]]
ANSWERS: list[tuple[list[Any], dict[str, Any], str, str]] = [
    (["A", "", "B"], {}, "AB", "completed"),
    (["A", "B"], {"max_output_tokens": 1}, "A", "incomplete"),
    (SPLIT, {}, "😀 ok歪", "completed"),
    (SPLIT, {"max_output_tokens": 1}, "", "incomplete"),
    (SPLIT, {"max_output_tokens": 5}, "😀 ok", "incomplete"),
    (["fooST", "OPbar", "more"], {"stop": ["STOP"]}, "foo", "completed"),
    (["fooST", "AR"], {"stop": "STOP"}, "fooSTAR", "completed"),
    (["Hi", "<|im_end|>"], {}, "Hi", "completed"),
    (["a\u2028b", "c\u0085d", "e\r\nf"], {}, "a\u2028bc\u0085de\r\nf", "completed"),
    (["\n\ndata: [DONE]\n\n", "event: error\n"], {}, "\n\ndata: [DONE]\n\nevent: error\n", "completed"),
]


@pytest.mark.parametrize("tokens_per_s", [0.0, 300.0], ids=["in_bursts", "one_by_one"])
@pytest.mark.parametrize(("script", "fields", "text", "status"), ANSWERS)
async def test_a6_b1_b2_b4_stream_whole_and_every_resume_say_the_same(
    deploy: Deploy, tokens_per_s: float, script: list[Any], fields: dict[str, Any], text: str, status: str
) -> None:
    up = await deploy({"script": script, "tokens_per_s": tokens_per_s}, pods=2)
    answer, whole = await stream(up, **fields), (await post(up, **fields)).json
    said = events(answer)
    last = said[-1]["response"]
    assert (text_of(whole), whole["status"]) == (text_of(last), last["status"]) == (text, status)
    assert "".join(event["delta"] for event in said if event["type"].endswith("text.delta")) == text
    assert last["usage"] == whole["usage"]
    job = answer.headers["x-request-id"]
    for index, position in enumerate(ids(answer)):
        by_id = await up.resume(job, position, pod=1)
        assert events(by_id) == said[index + 1 :] and ids(by_id) == ids(answer)[index + 1 :]
        by_number = await up.ask("GET", f"{PATH}/resp_{job}", 1, params={"stream": "true", "starting_after": index})
        assert by_number.body == by_id.body
    assert (await up.ask("GET", f"{PATH}/resp_{job}", 1)).json == last


async def test_a1_heartbeats_do_not_disturb_the_official_client(deploy: Deploy) -> None:
    up = await deploy({"script": ["A", "B"], "tokens_per_s": 4.0}, api={"heartbeat_s": 0.05, "headers_after_ms": 50})
    answer = await stream(up)
    assert len(_BEAT.findall(answer.body)) >= 2 and b"\n\n: " not in answer.body.replace(b"\n: ", b"")
    async with client_of(up) as client:
        made = await client.responses.create(model="scripted", input="hi", stream=True)
        deltas = [event.delta async for event in made if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "AB"


async def test_a8_a_break_is_told_after_the_text_and_a_whole_response_is_an_error(deploy: Deploy) -> None:
    up = await deploy({"script": ["A", "B"], "script_end": "error"})
    said = events(await stream(up))
    assert (said[-1]["type"], text_of(said[-1]["response"])) == ("response.failed", "AB")
    assert said[-1]["response"]["error"]["code"] == "engine_error"
    whole = await post(up)
    assert (whole.status, whole.error["code"], whole.error["type"]) == (500, "engine_error", "server_error")


async def test_an_error_of_the_pods_own_is_raised_by_the_official_client(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy({"tokens_per_s": 20.0}, {"reader_lease_s": 0.6})
    async with client_of(up) as client:
        made = await client.responses.create(model="scripted", input="hi", stream=True, max_output_tokens=5000)
        created = await anext(made)
        assert created.type == "response.created"
        for kind in ("job", "log"):
            redis_client.delete(*redis_client.keys(f"hr:*:{kind}:*"))
        with pytest.raises(openai.APIError) as caught:
            async for _ in made:
                pass
    assert caught.value.code == "log_lost"
    await eventually(lambda: not up.workers[0].running)


async def test_c_a_client_that_leaves_ends_its_job(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0}, api={"grace_s": 0})
    async with Open(up, max_output_tokens=5000) as opened:
        await opened.until(b"output_text.delta")
    await eventually(up.is_idle)
    assert await up.state_of(opened.job) == "cancelled"
    asking = asyncio.create_task(post(up, max_output_tokens=5000))
    await eventually(lambda: len(up.recorded.told) == 2 and up.recorded.tokens > 60)
    asking.cancel()
    await eventually(up.is_idle)
    assert up.recorded.tokens < 1000


async def test_a4_a_cancel_elsewhere_ends_the_stream_in_its_own_words(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0}, pods=2)
    async with Open(up, max_output_tokens=5000) as opened:
        await opened.until(b"output_text.delta")
        cancelled = await up.ask("POST", f"{PATH}/resp_{opened.job}/cancel", 1)
        answer = await opened.rest()
    assert (cancelled.status, cancelled.json["status"]) == (200, "cancelled")
    last = events(answer)[-1]
    assert (last["type"], last["response"]) == ("response.failed", cancelled.json)


async def test_e9_a_job_that_is_handed_on_is_one_stream_of_numbers(deploy: Deploy) -> None:
    up = await deploy({"script": SPLIT * 3, "tokens_per_s": 50.0}, pods=2)
    async with Open(up) as opened:
        await eventually(lambda: up.recorded.tokens >= 7)
        await up.workers[0].release_all()
        answer = await opened.rest()
    said = events(answer)
    assert [event["sequence_number"] for event in said] == list(range(len(said)))
    assert text_of(said[-1]["response"]) == "😀 ok歪" * 3
    assert (await up.resume(opened.job, pod=1)).body == _BEAT.sub(b"", answer.body)


async def test_e9_a_log_in_another_format(deploy: Deploy) -> None:
    up = await deploy(pods=2)
    job = (await stream(up, max_output_tokens=3)).headers["x-request-id"]
    whole = (await up.ask("GET", f"{PATH}/resp_{job}")).json
    chat = await up.resume(job, pod=1, format="openai.chat")
    said = "".join(c["delta"].get("content", "") for frame in read(chat.body) for c in frame["choices"])
    assert said == text_of(whole)
    other = (await up.stream(max_tokens=3)).headers["x-request-id"]
    again = await up.resume(other, format="openai.responses")
    assert text_of(events(again)[-1]["response"]) == said


NOT_BODIES = [
    *(b'{"model":', b"", b"[]", b'"x"', b"null", b'{"model":"scripted"}', b'{"model":"scripted","input":null}'),
    *(b'{"model":"scripted","input":"\xff"}', b'{"model":"scripted","input":"x","temperature":NaN}'),
    *(b'{"model":"scripted","input":"x"} y', b'{"model":"scripted","input":"\\ud800"}', b'{"model":5,"input":"x"}'),
    b'{"model":"scripted","input":"x","tools":' + b"[" * 500 + b"]" * 500 + b"}",
]


async def test_h4_h8_what_is_no_request_is_refused_before_anything_is_enqueued(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy({"context_tokens": 50})
    for content in NOT_BODIES:
        answer = await up.ask("POST", PATH, content=content)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), (content, answer.body)
        assert not any(word in answer.body.decode() for word in ("Traceback", ".py", "detail", "msgspec"))
    for is_stream in (True, False):
        wrong: list[dict[str, Any]] = [
            {"max_output_tokens": "3"},
            {"tools": [{"type": "web_search"}]},
            {"previous_response_id": "resp_x"},
        ]
        for fields in wrong:
            refused = await post(up, stream=is_stream, **fields)
            assert refused.status == 400 and str(refused.error["param"]).startswith(next(iter(fields)))
        assert (await post(up, stream=is_stream, model="other")).status == 404
    assert await up.is_idle() and not redis_client.keys("hr:*:job:*") and not up.recorded.told
    for is_stream in (True, False):
        long = await post(up, stream=is_stream, input="x" * 1000)
        assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    for path, method in ((PATH, "GET"), (f"{PATH}/resp_x", "PUT"), (f"{PATH}/resp_x/cancel", "GET")):
        assert (await up.ask(method, path)).status == 405
    queries: list[dict[str, str]] = [
        {"stream": "yes"},
        {"stream": "true", "starting_after": "-1"},
        {"stream": "true", "starting_after": "x"},
        {"stream": "true", "starting_after": "9" * 30},
        {"starting_after": "1"},
    ]
    made = (await post(up, max_output_tokens=1)).json["id"]
    for query in queries:
        assert (await up.ask("GET", f"{PATH}/{made}", params=query)).status == 400
    for page in ({"limit": "0x1"}, {"limit": "101"}, {"order": "up"}, {"after": "msg_x"}):
        assert (await up.ask("GET", f"{PATH}/{made}/input_items", params=page)).status == 400


class PickyEngine(RecordingEngine):
    """Refuses what it is asked for in a worker's words."""

    async def encode(self, job: Any) -> list[int]:
        raise BadRequest("not with this model", param=WORDS[job.sampling.seed])


WORDS = ["think", "messages", "response_format", "tools", "max_tokens"]


async def test_h8_what_a_worker_refuses_is_named_as_the_caller_knows_it(deploy: Deploy) -> None:
    up = await deploy(engine=PickyEngine)
    named = {"think": "reasoning.effort", "messages": "input", "response_format": "text.format"}
    for number, word in enumerate(WORDS):
        for is_stream in (True, False):
            answer = await post(up, stream=is_stream, seed=number)
            assert answer.status == 400
            assert answer.error["param"] == named.get(word, word)
        chat = await up.post(seed=number)
        assert chat.error["param"] == ("reasoning_effort" if word == "think" else word)


@pytest.mark.parametrize("number", ["1" * 25, "-" + "1" * 25, "1" * 5000, "1e400"], ids=["big", "low", "huge", "float"])
async def test_h7_numbers_that_no_machine_holds(deploy: Deploy, number: str) -> None:
    up = await deploy()
    schema = {"type": "object", "maximum": "here"}
    flat, inner = {"name": "f", "parameters": schema}, {"name": "f", "schema": schema}
    asked: list[tuple[str, dict[str, Any]]] = [
        (PATH, body(tools=[{"type": "function", **flat}])),
        (PATH, body(text={"format": {"type": "json_schema", **inner}})),
        ("/v1/chat/completions", up.body(tools=[{"type": "function", "function": flat}])),
        ("/v1/chat/completions", up.body(response_format={"type": "json_schema", "json_schema": inner})),
        ("/v1/embeddings", {"model": "scripted", "input": "a", "dimensions": "here"}),
    ]
    for path, fields in asked:
        answer = await up.ask("POST", path, content=json.dumps(fields).replace('"here"', number).encode())
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error"), (path, answer.body)
    assert not up.recorded.told and await up.is_idle()


async def test_h5_the_content_type_does_not_matter(deploy: Deploy) -> None:
    up = await deploy()
    content = json.dumps(body(max_output_tokens=1)).encode()
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        for mark in (b"", b"\xef\xbb\xbf"):
            answer = await up.ask("POST", PATH, content=mark + content, headers={"content-type": kind})
            assert answer.status == 200


async def test_a_full_queue_and_no_worker_are_told_by_status(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    for is_stream in (True, False):
        answer = await post(up, stream=is_stream)
        assert (answer.status, answer.error["code"]) == (503, "no_capacity")
    busy = await deploy({"slots": 1, "tokens_per_s": 10.0}, {"max_waiting_jobs": 1}, engine=RecordingEngine)
    async with Open(busy, max_output_tokens=5000):
        await post(busy, background=True)
        full = await post(busy)
        assert (full.status, full.error["code"]) == (429, "queue_full") and full.headers["retry-after"]
