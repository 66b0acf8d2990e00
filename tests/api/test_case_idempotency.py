"""`Idempotency-Key`: requests that are sent again are one job, however often, wherever and whenever they come."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest

from headrace.broker import keys
from headrace.broker.settings import KeySettings
from tests.api import reading
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, RecordingEngine
from tests.support import eventually
from tests.workers.replicas import oracle_text

KEY = {"idempotency-key": "order-7f3a"}
TEXT = oracle_text("hi", 20)


def jobs_of(up: Deployment) -> int:
    """How many sequences the replica was told to make."""
    return len(up.recorded.told)


def is_replay(answer: Answer) -> bool:
    given = answer.headers.get("x-idempotent-replay")
    assert given in (None, "true")
    return given is not None


def text_of(answer: Answer) -> str:
    assert answer.status == 200
    return reading.text_of(answer.json["choices"][0])


@pytest.mark.parametrize("with_key", [True, False])
async def test_a_storm_of_retries_with_one_key_runs_one_job(deploy: Deploy, with_key: bool) -> None:
    up = await deploy({"tokens_per_s": 100.0, "slots": 128}, pods=2)
    headers = KEY if with_key else None
    answers = await asyncio.gather(*(up.stream(pod=i % 2, headers=headers, max_tokens=20) for i in range(100)))
    assert {reading.content(answer.events) for answer in answers} == {TEXT}
    assert jobs_of(up) == (1 if with_key else 100)
    assert len({answer.headers["x-request-id"] for answer in answers}) == jobs_of(up)
    assert sum(map(is_replay, answers)) == 100 - jobs_of(up)
    if with_key:
        assert len({answer.body for answer in answers}) == 1


async def test_a_joined_response_in_one_piece_is_the_whole_answer(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 100.0}, pods=2)
    live = await asyncio.gather(*(up.post(pod=i % 2, headers=KEY, max_tokens=20) for i in range(4)))
    late = await up.post(pod=1, headers=KEY, max_tokens=20)
    answers = [*live, late]
    assert {text_of(answer) for answer in answers} == {TEXT}
    assert [is_replay(answer) for answer in answers].count(False) == 1
    assert is_replay(late)
    assert jobs_of(up) == 1


@pytest.mark.parametrize("route", ["chat", "completions"])
async def test_a_finished_stream_is_streamed_again_from_its_start(deploy: Deploy, route: str) -> None:
    up = await deploy(pods=2)
    first = await up.stream(route, headers=KEY, max_tokens=20)
    again = await up.stream(route, pod=1, headers=KEY, max_tokens=20)
    assert (is_replay(first), is_replay(again)) == (False, True)
    assert again.body == first.body
    assert jobs_of(up) == 1


@pytest.mark.parametrize("fields", [{"max_tokens": 21}, {"max_tokens": 20, "stream": True}])
async def test_another_body_under_the_same_key_is_refused(deploy: Deploy, fields: dict[str, Any]) -> None:
    up = await deploy()
    await up.post(headers=KEY, max_tokens=20)
    refused = await up.post(headers=KEY, **fields)
    assert (refused.status, refused.error["code"]) == (422, "idempotency_key_reused")
    assert (refused.error["type"], refused.error["param"]) == ("invalid_request_error", "Idempotency-Key")
    assert jobs_of(up) == 1


async def test_another_route_under_the_same_key_is_refused(deploy: Deploy) -> None:
    up = await deploy()
    both = up.body("chat", max_tokens=20)
    first = await up.ask("POST", "/v1/chat/completions", json=both, headers=KEY)
    other = await up.ask("POST", "/chat", json=both, headers=KEY)
    assert (first.status, other.status) == (200, 422)


async def test_two_owners_with_the_same_key_are_two_jobs(deploy: Deploy) -> None:
    owners = [KeySettings(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("ann", "bob")]
    up = await deploy(keys=owners)
    for owner in owners:
        headers = {**KEY, "authorization": f"Bearer {owner.owner}"}
        answer = await up.post(headers=headers, max_tokens=20)
        assert (text_of(answer), is_replay(answer)) == (TEXT, False)
    assert jobs_of(up) == 2


@pytest.mark.parametrize("key", ["", "a" * 256, "a b", "a\tb", "\xe9"])
async def test_a_key_that_is_none_is_refused(deploy: Deploy, key: str) -> None:
    up = await deploy()
    refused = await up.post(headers={"idempotency-key": key.encode("latin-1")}, max_tokens=1)  # type: ignore[dict-item]
    assert (refused.status, refused.error["code"]) == (400, "invalid_request")
    assert refused.error["param"] == "Idempotency-Key"
    assert jobs_of(up) == 0


async def test_the_longest_key_and_every_visible_character_are_taken(deploy: Deploy) -> None:
    up = await deploy()
    visible = "".join(map(chr, range(0x21, 0x7F)))
    for key in ("a" * 255, visible):
        assert text_of(await up.post(headers={"idempotency-key": key}, max_tokens=20)) == TEXT
    assert jobs_of(up) == 2


async def test_a_client_that_left_finds_its_whole_answer_when_it_comes_again(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    first = asyncio.create_task(up.post(headers=KEY, max_tokens=20))
    await eventually(lambda: up.recorded.steps)
    first.cancel()
    await asyncio.wait([first])
    again = await up.post(headers=KEY, max_tokens=20)
    assert (text_of(again), is_replay(again), jobs_of(up)) == (TEXT, True, 1)


async def test_a_key_whose_request_was_refused_may_be_used_again(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    refused = await up.post(headers=KEY, max_tokens=20)
    assert (refused.status, refused.error["code"]) == (503, "no_capacity")
    await up.add_worker(RecordingEngine)
    answer = await up.post(headers=KEY, max_tokens=20)
    assert (text_of(answer), is_replay(answer)) == (TEXT, False)


async def test_the_job_id_shows_nothing_of_the_key_and_a_lost_secret_is_put_back(deploy: Deploy) -> None:
    up = await deploy()
    answer = await up.post(headers=KEY, max_tokens=20)
    secret = await up.state().secret()
    made_of = keys.idempotent_job_id(secret, "anonymous", KEY["idempotency-key"], 1)
    assert answer.headers["x-request-id"] == made_of
    await up.broker._nodes.first.redis.delete(keys.key("secret", 0))
    up.state()._secret_until = 0.0
    assert await up.state().secret() == secret == await up.broker.secret(b"another")
