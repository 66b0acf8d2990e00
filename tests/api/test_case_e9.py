"""E9: who comes back, to any pod and by any way, gets exactly what it has not seen."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis

from headrace.broker import keys
from headrace.broker.settings import KeySettings
from headrace.workers.engines.scripted import oracle
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment, raw
from tests.api.reading import DONE, content, errors, parse
from tests.support import eventually

routes = pytest.mark.parametrize("route", PATHS)
TOKENS = 10
TEXT = "".join(f" {oracle('hi', 0, 0, index):08x}" for index in range(TOKENS))


@pytest.fixture
async def up(deploy: Deploy) -> AsyncIterator[Deployment]:
    yield await deploy({"tokens_per_s": 200.0}, pods=2)


async def a_stream(up: Deployment, route: str = "chat") -> tuple[str, Answer]:
    answer = await up.stream(route, max_tokens=TOKENS, stream_options={"include_usage": True})
    assert content(answer.events) == TEXT
    return answer.headers["x-request-id"], answer


@routes
async def test_e9_1_each_position_is_continued_exactly(up: Deployment, route: str) -> None:
    job, whole = await a_stream(up, route)
    for index, event in enumerate(whole.events[:-1]):
        by_header = await up.resume(job, event.id, pod=1)
        by_query = await up.resume(job, after=event.id)
        by_route = await up.ask("POST", PATHS[route], 1, headers={"last-event-id": event.id}, content=b"ignored {")
        for rest in (by_header, by_query, by_route):
            assert (rest.status, rest.headers["x-request-id"]) == (200, job)
            assert rest.events == whole.events[index + 1 :]
    assert len(up.recorded.told) == 1, "something was generated twice"


async def test_e9_1_the_header_is_newer_than_the_query(up: Deployment) -> None:
    job, whole = await a_stream(up)
    rest = await up.resume(job, whole.events[5].id, after=whole.events[1].id)
    assert rest.events == whole.events[6:]


async def test_e9_ids_grow_and_hold_nothing_that_a_header_cannot(up: Deployment) -> None:
    _, whole = await a_stream(up)
    ids = [event.id for event in whole.events[:-1]]
    places = [[int(part) for part in re.split(r"[.-]", id)[1:]] for id in ids]
    order = [(attempt, n, *(frame or [1 << 30])) for attempt, n, *frame in places]  # an entry's last frame has no third
    assert order == sorted(set(order))
    assert all(id.isascii() and id.isprintable() and " " not in id for id in ids)


async def test_e9_2_after_the_last_event_comes_the_end(up: Deployment) -> None:
    job, whole = await a_stream(up)
    assert [event.data for event in (await up.resume(job, whole.events[-2].id, pod=1)).events] == [DONE]


@pytest.mark.parametrize("after", [None, ""])
async def test_e9_3_4_without_a_position_all_of_it_comes(up: Deployment, after: str | None) -> None:
    job, whole = await a_stream(up)
    assert (await up.resume(job, after, pod=1)).body == whole.body


async def test_e9_4_an_empty_position_on_the_route_is_a_new_request(up: Deployment) -> None:
    first, second = await a_stream(up), await up.stream(headers={"last-event-id": ""}, max_tokens=TOKENS)
    assert second.headers["x-request-id"] != first[0] and content(second.events) == TEXT


BROKEN = ["abc", "-1", "9999999999999-0", "1-0", "9" * 1000, "{job}", "{job}.", "{job}.1", "{job}.1-", "{job}.x-1"]
BROKEN += [
    "{job}.1-1.0",
    "{job}.1-1.x",
    "{job}.-1-1",
    "{job}.1-1 ",
    " {job}.1-1\t1",
    "{job}.99999999999-1",
    "*",
    "$",
    ">",
]


async def test_e9_5_what_is_no_position_is_a_400(up: Deployment) -> None:
    job, _ = await a_stream(up)
    for text in BROKEN:
        position = text.format(job=job)
        for answer in (
            await up.resume(job, after=position),
            await up.ask("POST", PATHS["chat"], json=up.body(), params={"after": position}),
            *([] if position.strip() != position else [await up.resume(job, position)]),  # HTTP drops outer spaces
        ):
            assert (answer.status, answer.error["code"]) == (400, "invalid_position"), (text, answer.body)
    for position in (f"{job}.1-1\n", f"{job}.1-1\0", "é"):
        answer = await up.resume(job, after=position)
        assert (answer.status, answer.error["code"]) == (400, "invalid_position")
    assert len(up.recorded.told) == 1


@pytest.mark.parametrize("value", [b"9" * 1_000_000, b"a\0b", b"a\rb"], ids=["long", "nul", "cr"])
async def test_e9_5_a_header_that_http_forbids_is_refused_in_our_words(up: Deployment, value: bytes) -> None:
    job, _ = await a_stream(up)
    head = b"GET /v1/streams/%b HTTP/1.1\r\nhost: localhost\r\nlast-event-id: %b\r\n\r\n" % (job.encode(), value)
    _, answer = await raw(up.pods[0].url, [head])
    assert (answer.status, answer.error["type"]) in [(400, "invalid_request_error"), (431, "invalid_request_error")]


@pytest.mark.parametrize("place", ["0-0", "0-2", "1-400", "2-0", "1-1.99", "1-5.1"])
async def test_e9_6_a_position_that_the_log_does_not_hold_is_lost(up: Deployment, place: str) -> None:
    """Never a silent jump: the client has something that this log does not say."""
    job, _ = await a_stream(up)
    for answer in (await up.resume(job, f"{job}.{place}", pod=1), await up.resume(job, after=f"{job}.{place}")):
        assert (answer.status, answer.error["code"]) == (410, "log_lost")
        assert answer.headers["x-request-id"] == job


async def test_e9_6_a_log_that_lost_its_end_says_so(up: Deployment, redis_client: redis.Redis) -> None:
    job, whole = await a_stream(up)
    log = keys.key("log", keys.shard_of(job), job)
    redis_client.xtrim(log, minid="1-6", approximate=False)
    for event in whole.events[:4]:
        answer = await up.resume(job, event.id, pod=1)
        assert (answer.status, answer.error["code"]) in [(410, "log_lost"), (500, "log_gap")]


async def test_e9_6_a_log_that_is_lost_under_its_readers_ends_their_streams(
    deploy: Deploy, redis_client: redis.Redis
) -> None:
    up = await deploy({"tokens_per_s": 20.0}, {"reader_lease_s": 0.6})
    async with up.open(max_tokens=5000) as opened:
        await opened.until(b" ")
        redis_client.delete(*(keys.key(kind, keys.shard_of(opened.job), opened.job) for kind in ("job", "log")))
        answer = await opened.rest()
    assert [error["code"] for error in errors(answer.events)] == ["log_lost"]
    assert answer.events[-2].id == "", "an empty id would erase the position that the client has"
    assert b"id: \n" not in answer.body
    await eventually(lambda: not up.workers[0].running)


async def test_e9_7_a_position_of_another_stream_is_a_400(up: Deployment) -> None:
    (one, _), (_, other) = await a_stream(up), await a_stream(up)
    answer = await up.resume(one, other.events[3].id)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "invalid_position", "Last-Event-ID")


async def test_e9_8_an_unknown_stream_is_a_404(up: Deployment) -> None:
    unknown = keys.new_job_id(1)
    for answer in (
        await up.resume(unknown),
        await up.resume(unknown, f"{unknown}.1-1"),
        await up.ask("POST", PATHS["chat"], json=up.body(), headers={"last-event-id": f"{unknown}.1-1"}),
        await up.ask("DELETE", f"/v1/streams/{unknown}"),
        await up.ask("GET", f"/v1/streams/{unknown}/status"),
    ):
        assert (answer.status, answer.error["code"]) == (404, "stream_not_found")
    for text in ("abc", unknown.upper(), "ffff" + unknown[4:], unknown + "0"):
        assert (await up.resume(text)).error["code"] == "invalid_request"


async def test_e9_9_many_readers_get_all_of_it(up: Deployment) -> None:
    async with up.open(max_tokens=TOKENS) as opened:
        answers = await asyncio.gather(*(up.resume(opened.job, pod=pod) for pod in (0, 1, 0, 1)))
        first = await opened.rest()
    assert {answer.body for answer in answers} == {first.body}


@routes
async def test_e9_10_who_comes_back_while_the_first_connection_is_open(deploy: Deploy, route: str) -> None:
    """The first one leaves then; the job goes on for the second."""
    up = await deploy({"tokens_per_s": 40.0}, api={"grace_s": 0}, pods=2)
    async with up.open(route, max_tokens=TOKENS) as first:
        await first.until(b" ")
        last = parse(first.read)[-1].id
        second = asyncio.create_task(up.resume(first.job, last, pod=1))
        await eventually(lambda: up.state(1).tail.readers == 1)
        seen = parse(first.read)
    rest = await second
    assert content([*seen, *rest.events]) == TEXT


async def test_e9_11_leaving_again_before_anything_new_came(deploy: Deploy) -> None:
    up = await deploy({"script": ["A", "B"], "tokens_per_s": 2.0}, pods=2)
    async with up.open() as opened:
        await opened.until(b'"A"')
    last = parse(opened.read)[-1].id
    for pod in (1, 0, 1):
        url = f"{up.pods[pod].url}/v1/streams/{opened.job}"
        async with up.http.stream("GET", url, headers={"last-event-id": last}) as again:
            assert again.status_code == 200
    rest = await up.resume(opened.job, last, pod=1)
    assert content([*parse(opened.read), *rest.events]) == "AB"


async def test_e9_a_position_inside_an_entry_is_good_in_its_own_format_only(up: Deployment) -> None:
    job, whole = await a_stream(up)
    inside = next(event.id for event in whole.events if event.id.count(".") == 2)
    same = await up.resume(job, inside, pod=1, format="openai.chat")
    assert same.events == whole.events[[event.id for event in whole.events].index(inside) + 1 :]
    for answer in (
        await up.resume(job, inside, format="openai.completions"),
        await up.ask("POST", PATHS["completions"], headers={"last-event-id": inside}),
    ):
        assert (answer.status, answer.error["code"]) == (400, "invalid_position")


async def test_e9_the_same_log_in_another_format(up: Deployment) -> None:
    job, _ = await a_stream(up)
    other = await up.resume(job, pod=1, format="openai.completions")
    assert content(other.events) == TEXT
    assert other.events[0].json["object"] == "text_completion"
    for index, event in enumerate(other.events[:-1]):
        if event.id.count(".") == 1:
            rest = await up.resume(job, event.id, format="openai.completions")
            assert rest.events == other.events[index + 1 :]
    answer = await up.resume(job, format="nope")
    assert (answer.status, answer.error["param"]) == (400, "format")


async def test_e9_the_stream_of_somebody_else_is_not_there(deploy: Deploy) -> None:
    owners = [KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest()) for owner in ("alice", "bob")]
    up = await deploy({"tokens_per_s": 200.0}, pods=2, keys=owners)
    alice, bob = ({"authorization": f"Bearer {key.owner}"} for key in owners)
    whole = await up.stream(headers=alice, max_tokens=TOKENS)
    job, last = whole.headers["x-request-id"], {"last-event-id": whole.events[3].id}

    async def ask(who: dict[str, str]) -> list[Answer]:
        requests: list[tuple[str, str, dict[str, Any]]] = [
            ("GET", f"/v1/streams/{job}", who),
            ("GET", f"/v1/streams/{job}", who | last),
            ("POST", PATHS["chat"], who | last),
            ("GET", f"/v1/streams/{job}/status", who),
            ("DELETE", f"/v1/streams/{job}", who),
        ]
        return [await up.ask(method, path, 1, headers=headers) for method, path, headers in requests]

    assert [answer.status for answer in await ask(alice)] == [200] * 5
    assert [(answer.status, answer.error["code"]) for answer in await ask(bob)] == [(404, "stream_not_found")] * 5
    assert {answer.status for answer in await ask({})} == {401}
