"""Case I1: limits hold over pods and formats, and no way to leave keeps a place or goes around them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import datetime
from typing import Any

import pytest
import redis
from websockets.asyncio.client import connect

from headrace.broker import keys
from headrace.broker.api_keys import KeySettings
from headrace.broker.limits import Limits, home_shard
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment
from tests.support import eventually

SLOW = {"tokens_per_s": 20.0}
SOON = {"grace_s": 0.0}
ONE = Limits(max_jobs=1)
HI = [{"role": "user", "content": "hi"}]


def a_key(owner: str = "alice", **fields: Any) -> KeySettings:
    return KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest(), **fields)


def bearing(owner: str = "alice") -> dict[str, str]:
    return {"authorization": f"Bearer {owner}"}


async def begin(up: Deployment, pod: int = 0, max_tokens: int = 400) -> Any:
    """A stream that has begun, as a response which the test must close; the status if it was refused."""
    body, url = up.body(stream=True, max_tokens=max_tokens), up.pods[pod].url + "/v1/chat/completions"
    response = await up.http.send(up.http.build_request("POST", url, json=body, headers=bearing()), stream=True)
    if response.status_code == 200:
        parts = response.aiter_raw()
        while b"content" not in await anext(parts):
            pass
    return response


async def ask(up: Deployment, pod: int = 0, **fields: Any) -> Answer:
    return await up.post(pod=pod, headers=bearing(), **{"max_tokens": 1, **fields})


async def is_free(up: Deployment) -> bool:
    answer = await ask(up)
    assert answer.status in (200, 429)
    return answer.status == 200


def places(client: redis.Redis) -> int:
    """Taken in all keys and owners."""
    return sum(client.zcard(name) for name in client.scan_iter(match="hr:*:slots:*"))


async def test_i1_a_second_stream_is_refused_while_the_first_still_streams_on_any_pod(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy(SLOW, api=SOON, pods=2, keys=[a_key(limits=ONE)])
    first = await begin(up)
    for pod in (0, 1):
        for stream in (True, False):
            refused = await ask(up, pod, stream=stream)
            assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
            assert refused.error["code"] == "rate_limit_exceeded" and "jobs: 1" in refused.error["message"]
            assert refused.headers["retry-after"] == "1"
    await first.aclose()
    await eventually(lambda: is_free(up))
    await eventually(lambda: places(redis_client) == 0)


async def test_i1_streams_that_are_cut_give_their_places_back(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(SLOW, api=SOON, pods=2, keys=[a_key(limits=Limits(max_jobs=20))])
    streams = await asyncio.gather(*(begin(up, number % 2) for number in range(20)))
    assert places(redis_client) == 20 and (await ask(up)).status == 429
    await asyncio.gather(*(stream.aclose() for stream in streams))
    await eventually(lambda: places(redis_client) == 0)
    assert (await ask(up)).status == 200


async def test_i1_never_more_at_once_than_the_limit_over_two_pods(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy({"tokens_per_s": 200.0}, pods=2, keys=[a_key(owner_limits=Limits(max_jobs=2))])
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, places(redis_client))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(ask(up, number % 2, max_tokens=4) for number in range(40)))
    watching.cancel()
    assert {answer.status for answer in answers} == {200, 429} and most <= 2
    assert sum(answer.status == 200 for answer in answers) >= 2


async def test_i1_tokens_of_streams_without_usage_are_counted(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key(limits=Limits(tokens_per_minute=110))])
    statuses = [(await ask(up, stream=True, max_tokens=50)).status for _ in range(10)]
    assert statuses == [200, 200] + [429] * 8


async def test_i1_all_formats_share_one_limit_and_say_it_in_their_own_words(deploy: Deploy) -> None:
    up = await deploy(SLOW, api=SOON, keys=[a_key(limits=ONE)])
    first = await begin(up)
    said = {
        "/v1/chat/completions": {"model": "scripted", "messages": HI},
        "/v1/completions": {"model": "scripted", "prompt": "hi"},
        "/v1/responses": {"model": "scripted", "input": "hi"},
        "/v1/messages": {"model": "scripted", "messages": HI, "max_tokens": 1},
        "/api/chat": {"model": "scripted", "messages": HI},
        "/api/generate": {"model": "scripted", "prompt": "hi"},
        "/completion": {"prompt": "hi"},
        "/generate": {"inputs": "hi"},
        "/generate_stream": {"inputs": "hi"},
        "/chat": {"prompt": "hi"},
    }
    for path, body in said.items():
        answer = await up.ask("POST", path, headers=bearing(), json=body)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1"), path
        assert "jobs: 1" in answer.body.decode()
    answer = await up.ask("POST", "/generate", headers=bearing(), json={"inputs": "hi"})
    assert answer.json["error_type"] == "overloaded"
    async with connect(up.pods[0].url.replace("http", "ws") + "/ws/chat", additional_headers=bearing()) as ws:
        await ws.send(json.dumps({"prompt": "hi"}))
        assert json.loads(await ws.recv())["error"]["code"] == "rate_limit_exceeded"
        await ws.wait_closed()
        assert ws.close_code == 1013
    await first.aclose()


async def test_i1_a_resume_takes_no_second_place(deploy: Deploy) -> None:
    up = await deploy(SLOW, pods=2, keys=[a_key(limits=ONE)])
    first = await begin(up, max_tokens=30)
    job = first.headers["x-request-id"]
    await first.aclose()
    answers = await asyncio.gather(*(up.ask("GET", f"/v1/streams/{job}", pod, headers=bearing()) for pod in (0, 1, 0)))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1


async def test_i1_a_request_that_is_wrong_takes_nothing(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=[a_key(limits=Limits(max_jobs=1, requests_per_minute=2))])
    wrongs: list[dict[str, Any]] = [{"temperature": 9}, {"n": 0}, {"messages": []}, {"model": "nobody"}]
    for wrong in wrongs:
        assert (await ask(up, **wrong)).status in (400, 404)
    assert places(redis_client) == 0
    assert [(await ask(up)).status for _ in range(3)] == [200, 200, 429]


async def test_i1_the_place_of_a_stream_whose_pod_died_is_free_after_the_reading_lease(deploy: Deploy) -> None:
    up = await deploy(SLOW, {"reader_lease_s": 1.0}, SOON, pods=2, keys=[a_key(limits=ONE)])
    first = await begin(up)
    up.pods[0].die()
    state = up.state(0)
    for task in state._tasks + state.tail._tasks:
        task.cancel()  # it renews no lease any more

    async def is_free_elsewhere() -> bool:
        return (await ask(up, 1)).status == 200

    await eventually(is_free_elsewhere, 3 * 3.0)
    await first.aclose()


async def test_how_the_limits_stand_is_in_the_headers(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key(limits=Limits(requests_per_minute=2, tokens_per_minute=6000)), a_key("bob")])
    for stream in (False, True):
        answer = await ask(up, stream=stream, max_tokens=9)
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-limit-tokens"] == "6000"
        assert 5900 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 6000
        assert answer.headers["x-ratelimit-reset-tokens"].endswith("s")
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await ask(up)
    assert refused.status == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    body = {"model": "scripted", "messages": HI, "max_tokens": 1}
    anthropic = await up.ask("POST", "/v1/messages", headers=bearing(), json=body)
    assert anthropic.status == 429 and anthropic.json["error"]["type"] == "rate_limit_error"
    assert anthropic.headers["anthropic-ratelimit-requests-limit"] == "2"
    assert anthropic.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert datetime.fromisoformat(anthropic.headers["anthropic-ratelimit-requests-reset"])
    free = await up.post(headers=bearing("bob"), max_tokens=1)
    assert not [name for name in free.headers if "ratelimit" in name]


@pytest.mark.parametrize("shards", [4])
async def test_with_many_shards_a_limit_is_as_exact_since_its_owner_lives_on_one(deploy: Deploy, shards: int) -> None:
    limits = Limits(requests_per_minute=12)
    up = await deploy(pods=2, keys=[a_key(owner_limits=limits), a_key("bob")], shards=shards)
    answers = await asyncio.gather(*(ask(up, number % 2) for number in range(20)))
    assert sorted(answer.status for answer in answers) == [200] * 12 + [429] * 8
    found = {keys.shard_of(answer.headers["x-request-id"]) for answer in answers if answer.status == 200}
    assert found == {home_shard("alice", shards)}
    others = await asyncio.gather(*(up.post(headers=bearing("bob"), max_tokens=1) for _ in range(20)))
    assert len({keys.shard_of(answer.headers["x-request-id"]) for answer in others}) > 1


async def test_resumes_are_bounded(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key(), a_key("bob")], api={"resumes_per_minute": 3})
    job = (await up.stream(headers=bearing(), max_tokens=1)).headers["x-request-id"]
    answers = [await up.ask("GET", f"/v1/streams/{job}", headers=bearing()) for _ in range(4)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429]
    assert "resumes per minute: 3" in answers[-1].error["message"] and int(answers[-1].headers["retry-after"]) <= 20
    assert (await up.ask("GET", f"/v1/streams/{job}", headers=bearing("bob"))).status == 404
