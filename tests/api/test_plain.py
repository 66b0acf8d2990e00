"""The plain format over HTTP, and what `EventSource` does with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import redis

from headrace.api.wire import BY_NAME
from headrace.broker.errors import BadRequest
from headrace.broker.settings import ApiSettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, Opened
from tests.api.reading import Event
from tests.support import eventually
from tests.workers.replicas import oracle_text

SLOW = {"tokens_per_s": 20.0}


async def ask(up: Deployment, pod: int = 0, **body: Any) -> Answer:
    return await up.ask("POST", "/chat", pod, json={"prompt": "hi", **body})


def text_of(events: list[Event]) -> str:
    return "".join(event.json["token"] for event in events if "token" in event.json)


def error_of(answer: Answer) -> dict[str, Any]:
    assert answer.json.keys() == {"error", "done"} and answer.json["done"] is True
    error: dict[str, Any] = answer.json["error"]
    return error


def jobs(redis_client: redis.Redis) -> int:
    return len(list(redis_client.scan_iter(match="hr:{0000}:job:*")))


async def test_a_stream_and_a_whole_answer(deploy: Deploy) -> None:
    up = await deploy()
    streamed, whole = await ask(up, max_tokens=3), await ask(up, max_tokens=3, stream=False, model="scripted")
    *objects, last = [event.json for event in streamed.events]
    assert text_of(streamed.events) == oracle_text("hi", 3)
    assert not any(each["done"] for each in objects) and last["done"] is True
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "cached_tokens": 0}
    assert whole.json == {**last, "token": oracle_text("hi", 3)}
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    answer = await up.ask("POST", "/chat", json={"messages": messages, "max_tokens": 1})
    assert text_of(answer.events) == oracle_text("hi", 1)


async def test_a8_a_failure_is_the_last_object(deploy: Deploy) -> None:
    up = await deploy({"script": ["A"], "script_end": "error"})
    streamed, whole = await ask(up), await ask(up, stream=False)
    assert (whole.status, error_of(whole)["code"]) == (500, "engine_error")
    assert streamed.events[-1].json == whole.json and text_of(streamed.events) == "A"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None, "messages": None}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "banana", "content": "x"}]}, "messages[0].role"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens"),
        ({"prompt": "x", "temperature": 2.1}, "temperature"),
        ({"prompt": "x", "top_p": -1}, "top_p"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "seed": 2**63}, "seed"),
        ({"prompt": "x", "tools": []}, "tools"),
    ],
)
def test_h4_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        BY_NAME["plain"].parse(json.dumps(body).encode(), ApiSettings())
    assert caught.value.param == param
    said = json.loads(BY_NAME["plain"].error_body(caught.value))
    assert (said["error"]["code"], said["error"]["param"], said["done"]) == ("invalid_request", param, True)


def test_h3_what_the_worker_is_told() -> None:
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty")
    for value in (0, None):
        body = {"prompt": "x", **dict.fromkeys(names, value)}
        told = BY_NAME["plain"].parse(json.dumps(body).encode(), ApiSettings()).job.sampling
        assert [getattr(told, name) for name in names] == [value] * len(names)


# -- EventSource -------------------------------------------------------------------------------------------------------


class Source:
    """What a browser's `EventSource` does: it comes back with the last id, until a status is not 200."""

    def __init__(self, up: Deployment, query: str) -> None:
        self._up = up
        self._query = query
        self.events: list[Event] = []
        self.statuses: list[int] = []

    async def connect(self, pod: int = 0, events: int = 10_000) -> None:
        """One connection, left after so many events."""
        last = next((event.id for event in reversed(self.events) if event.id), None)
        headers = {"accept": "text/event-stream", **({"last-event-id": last} if last else {})}
        url = self._up.pods[pod].url + "/chat?" + self._query
        async with self._up.http.stream("GET", url, headers=headers) as response:
            self.statuses.append(response.status_code)
            read, before = b"", len(self.events)
            async for part in response.aiter_raw():
                read += part
                blocks = [block for block in read.split(b"\n\n")[:-1] if b"data: " in block]
                self.events[before:] = [_event(block) for block in blocks[:events]]
                if len(blocks) >= events:
                    return


def _event(block: bytes) -> Event:
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
    return Event(fields.get(b"id", b"").decode(), fields[b"data"].decode())


async def test_eventsource_comes_back_resumes_and_stays_away_at_the_end(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy(SLOW, pods=2)
    source = Source(up, "prompt=hi&max_tokens=8&temperature=0&stop=nothing&stop=never")
    for pod, events in ((0, 1), (1, 3), (0, 2), (1, 10_000), (0, 10_000)):
        await source.connect(pod, events)
    assert source.statuses == [200, 200, 200, 200, 204]
    assert text_of(source.events) == oracle_text("hi", 8)
    assert [event.json["done"] for event in source.events].count(True) == 1
    assert jobs(redis_client) == 1 and len(up.recorded.told) == 1
    [told] = up.recorded.told
    assert (told.job.stop, told.job.sampling.temperature) == (["nothing", "never"], 0.0)


async def test_eventsource_stays_away_after_an_error(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy({"script": ["A"], "script_end": "error"})
    source = Source(up, "prompt=hi")
    await source.connect()
    await source.connect()
    assert source.statuses == [200, 204] and "error" in source.events[-1].json
    assert jobs(redis_client) == 1


async def test_a_request_that_waits_has_its_position_with_the_headers(deploy: Deploy) -> None:
    """So that one who leaves then comes back to the same place in the queue."""
    up = await deploy({"slots": 1, "tokens_per_s": 20.0}, api={"headers_after_ms": 50, "grace_s": 1})
    async with up.open(max_tokens=5000) as running:
        source = Source(up, "prompt=hi&max_tokens=1")
        await source.connect(events=1)
        assert source.events[0].id.endswith(".0-1") and source.events[0].json == {"token": "", "done": False}
        coming = asyncio.create_task(source.connect())
        await up.ask("DELETE", f"/v1/streams/{running.job}")
        await coming
    assert text_of(source.events) == oracle_text("hi", 1)
    assert len(up.recorded.told) == 2


@pytest.mark.parametrize(
    "query", ["", "prompt=", "prompt=a&prompt=b", "prompt=a&max_tokens=x", "prompt=a&max_tokens=0", "prompt=a&user=x"]
)
async def test_h4_a_query_that_is_wrong(deploy: Deploy, redis_client: redis.Redis, query: str) -> None:
    up = await deploy()
    answer = await up.ask("GET", f"/chat?{query}")
    assert (answer.status, error_of(answer)["code"]) == (400, "invalid_request")
    assert jobs(redis_client) == 0


async def test_any_stream_can_be_read_plain(deploy: Deploy) -> None:
    up = await deploy(pods=2)
    began = await up.stream(max_tokens=3)
    job = began.headers["x-request-id"]
    for name in ("plain", "plain.ndjson", "tgi", "llamacpp.completion"):
        answer = await up.resume(job, pod=1, format=name)
        assert answer.status == 200
        if name == "plain.ndjson":
            lines = [json.loads(line) for line in answer.body.splitlines()]
            assert answer.headers["content-type"] == "application/x-ndjson"
            assert "".join(line["token"] for line in lines) == oracle_text("hi", 3)
            assert lines[-1]["id"].startswith(job)


async def test_d1_a_plain_client_that_leaves_stops_the_worker(deploy: Deploy) -> None:
    up = await deploy(SLOW, api={"grace_s": 0})
    url = up.pods[0].url + "/chat"
    async with up.http.stream("POST", url, json={"prompt": "hi", "max_tokens": 10_000}) as response:
        await Opened(response).until(b'"token":" ')
    await eventually(up.is_idle)
