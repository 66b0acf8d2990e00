"""What all of these formats keep on a pod: resume anywhere, keys, heartbeats, and what a client's leaving means."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import redis

from headrace.broker.settings import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Opened
from tests.api.reading import parse
from tests.support import eventually

STREAMS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "hi", "stream": True, "n_predict": 4},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": 4}},
    "/": {"inputs": "hi", "parameters": {"max_new_tokens": 4}, "stream": True},
    "/chat": {"prompt": "hi", "max_tokens": 4},
}
WHOLES: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "hi"},
    "/generate": {"inputs": "hi"},
    "/": {"inputs": "hi"},
    "/chat": {"prompt": "hi", "stream": False},
}
OTHERS = ("/completions", "/tokenize", "/detokenize", "/apply-template", "/embedding")
KEY = KeySettings("alice", hashlib.sha256(b"sk-alice").hexdigest())
streams = pytest.mark.parametrize("path", STREAMS)


@streams
async def test_e9_a_stream_can_be_taken_up_at_any_frame_on_another_pod(
    deploy: Deploy, redis_client: redis.Redis, path: str
) -> None:
    up = await deploy(pods=2)
    whole = await up.ask("POST", path, json=STREAMS[path])
    job = whole.headers["x-request-id"]
    for n, event in enumerate(whole.events):
        on_stream = await up.resume(job, event.id, pod=1)
        on_route = await up.ask("POST", path, 1, json=STREAMS[path], headers={"last-event-id": event.id})
        assert parse(on_stream.body) == parse(on_route.body) == whole.events[n + 1 :]
    assert len(list(redis_client.scan_iter(match="hr:{0000}:job:*"))) == 1


@streams
async def test_a1_heartbeats_stand_between_events(deploy: Deploy, path: str) -> None:
    up = await deploy({"tokens_per_s": 4.0}, api={"heartbeat_s": 0.1})
    answer = await up.ask("POST", path, json=STREAMS[path])
    assert answer.body.count(b"\n: working\n") + answer.body.startswith(b": ") > 2
    assert len(answer.events) >= 5
    assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"


@streams
async def test_d1_a_client_that_leaves_stops_the_worker(deploy: Deploy, path: str) -> None:
    up = await deploy({"tokens_per_s": 20.0}, api={"grace_s": 0})
    body: dict[str, Any] = {**STREAMS[path]}
    for name in ("n_predict", "max_tokens"):
        if name in body:
            body[name] = 10_000
    if "parameters" in body:
        body["parameters"] = {"max_new_tokens": 10_000}
    async with up.http.stream("POST", up.pods[0].url + path, json=body) as response:
        await Opened(response).until(b"\n\n")
    await eventually(up.is_idle)


@streams
async def test_h8_errors_that_are_known_early_have_a_status(deploy: Deploy, path: str) -> None:
    up = await deploy({"context_tokens": 64})
    long = {name: "x" * 400 for name in ("prompt", "inputs") if name in STREAMS[path]}
    whole = await up.ask("POST", path, json={**STREAMS[path], **long})
    assert whole.status in (400, 422) and whole.headers["content-type"] == "application/json"
    assert "x-request-id" in whole.headers


async def test_h8_without_a_replica_it_is_503(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    for path, body in STREAMS.items():
        answer = await up.ask("POST", path, json=body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert answer.json.keys() in ({"error"}, {"error", "error_type"}, {"error", "done"})


async def test_i2_every_route_asks_for_the_key(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=[KEY])
    asked: list[tuple[str, str]] = [("POST", path) for path in (*STREAMS, *WHOLES, *OTHERS)]
    asked += [("GET", path) for path in ("/props", "/slots", "/info", "/chat?prompt=hi", "/chat?key=sk-alice")]
    for method, path in asked:
        answer = await up.ask(method, path, headers={"authorization": "Bearer sk-alic"}, json={})
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert "sk-alic" not in answer.body.decode()
    assert list(redis_client.scan_iter(match="hr:{0000}:job:*")) == []
    assert (await up.ask("GET", "/health")).status == 200
    for path, body in WHOLES.items():
        answer = await up.ask("POST", path, headers={"authorization": "Bearer sk-alice"}, json=body)
        assert answer.status == 200
