"""A2, A4, A6: line separators, the end marker, and finish reasons, as they stand on the wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.workers.engines.protocol import Step
from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment, RecordingEngine
from tests.api.reading import DONE, choices, content, errors, finishes, frames, text_of
from tests.support import eventually

routes = pytest.mark.parametrize("route", PATHS)
SEPARATED = ["a\u2028b", "c\u2029d", "e\u0085f", "g\nh", "i\r\nj"]


@routes
async def test_a2_line_separators_reach_the_client_and_not_the_wire(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": SEPARATED})
    streamed, whole = await up.stream(route), await up.post(route)
    assert content(streamed.events) == text_of(whole.json["choices"][0]) == "".join(SEPARATED)
    for body in (streamed.body, whole.body):
        assert not any(raw in body for raw in (b"\xe2\x80\xa8", b"\xe2\x80\xa9", b"\xc2\x85", b"\r"))
        assert not body.decode().strip("\n").replace("\n", "").splitlines()[1:]


async def test_a2_they_may_stand_in_a_request_too(deploy: Deploy) -> None:
    up = await deploy()
    await up.post("completions", prompt="a\u2028b\u2029c\u0085d", stop="\u2028", max_tokens=1)
    [told] = up.recorded.told
    assert told.job.prompt.text == "a\u2028b\u2029c\u0085d"  # type: ignore[union-attr]


def assert_ends_well(answer: Answer) -> None:
    """The marker is there once and last, closed by its blank line; nothing follows."""
    assert answer.status == 200
    assert answer.body.endswith(b"\n\ndata: [DONE]\n\n") and answer.body.count(b"data: [DONE]") == 1
    assert answer.events[-1] == ("", DONE)
    frames(answer.events)


@routes
@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ({"script": ["A", "B"]}, {}, "stop"),
        ({"script": ["A", "B"], "script_end": "limit"}, {}, "length"),
        ({"script": ["A", "B"]}, {"max_tokens": 1}, "length"),
        ({"script": ["A", "B", "X"]}, {"stop": "X"}, "stop"),
        ({"script": ["A", "B", "X"]}, {"stop": "A", "stream_options": {"include_usage": True}}, "stop"),
    ],
    ids=["eos", "limit", "max_tokens", "stop", "stop_and_usage"],
)
async def test_a4_the_end_marker_is_once_and_last(
    deploy: Deploy, route: str, model: dict[str, Any], fields: dict[str, Any], reason: str
) -> None:
    up = await deploy(model)
    answer = await up.stream(route, **fields)
    assert_ends_well(answer)
    assert finishes(answer.events)[-1] == reason


@routes
async def test_a4_also_after_an_error(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["A", "B"], "script_end": "error"})
    answer = await up.stream(route)
    assert_ends_well(answer)
    assert content(answer.events) == "AB" and len(errors(answer.events)) == 1


@routes
async def test_a4_also_after_a_cancel(deploy: Deploy, route: str) -> None:
    up = await deploy({"tokens_per_s": 50.0}, pods=2)
    async with up.open(route, max_tokens=5000) as opened:
        await opened.until(b" ")
        cancelled = await up.ask("DELETE", f"/v1/streams/{opened.job}", pod=1)
        answer = await opened.rest()
    assert cancelled.json == {"id": opened.job, "object": "stream", "was": "running", "cancelled": True}
    assert_ends_well(answer)
    assert [error["code"] for error in errors(answer.events)] == ["cancelled"]
    assert set(finishes(answer.events)) == {None}
    again = await up.ask("DELETE", f"/v1/streams/{opened.job}")
    assert (again.json["was"], again.json["cancelled"]) == ("ended", False)


@routes
async def test_a4_also_after_a_cancel_while_waiting(deploy: Deploy, route: str) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 20.0}, api={"headers_after_ms": 50, "grace_s": 0})
    async with up.open(max_tokens=5000), up.open(route) as waiting:
        await waiting.until(b"queued")
        assert (await up.ask("DELETE", f"/v1/streams/{waiting.job}")).json["was"] == "waiting"
        answer = await waiting.rest()
    assert_ends_well(answer)
    assert content(answer.events) == "" and [error["code"] for error in errors(answer.events)] == ["cancelled"]


async def test_a4_a_cancel_before_the_headers_has_a_real_status(deploy: Deploy) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 20.0}, api={"headers_after_ms": 10_000, "grace_s": 0})
    async with up.open(max_tokens=5000) as running:
        asking = asyncio.create_task(up.stream())
        await eventually(lambda: len(up.jobs()) == 2)
        [waiting] = up.jobs() - {running.job}
        await up.ask("DELETE", f"/v1/streams/{waiting}")
        answer = await asking
    assert (answer.status, answer.error["code"]) == (409, "cancelled")
    assert answer.headers["x-request-id"] == waiting


class SilentEngine(RecordingEngine):
    """Ends a sequence before its first token."""

    def _step(self, sequence: Any) -> bool:
        sequence.emit(Step([], None, "eos"))
        return False


@routes
@pytest.mark.parametrize(
    ("model", "fields", "text", "reason"),
    [
        ({"script": ["", "A", "", "B"], "tokens_per_s": 200.0}, {}, "AB", "stop"),
        ({"script": ["A", "B"]}, {"max_tokens": 2}, "AB", "length"),
        ({"script": ["A", "X", "B"], "tokens_per_s": 200.0}, {"stop": ["X"]}, "A", "stop"),
        ({"script": ["A", "B"], "tokens_per_s": 200.0}, {"max_tokens": 1}, "A", "length"),
    ],
    ids=["empty_tokens", "limit", "stop", "one_token"],
)
async def test_a6_the_last_chunk_and_no_other_has_a_finish_reason(
    deploy: Deploy, route: str, model: dict[str, Any], fields: dict[str, Any], text: str, reason: str
) -> None:
    up = await deploy(model)
    await assert_finish(up, route, fields, text, reason)


@routes
async def test_a6_no_token_at_all_is_an_answer(deploy: Deploy, route: str) -> None:
    up = await deploy(engine=SilentEngine)
    await assert_finish(up, route, {}, "", "stop")


async def assert_finish(up: Deployment, route: str, fields: dict[str, Any], text: str, reason: str) -> None:
    answer = await up.stream(route, **fields)
    assert all("finish_reason" in choice for choice in choices(answer.events))
    *before, last = finishes(answer.events)
    assert (content(answer.events), last, set(before) - {None}) == (text, reason, set())
    whole = (await up.post(route, **fields)).json["choices"][0]
    assert (text_of(whole), whole["finish_reason"]) == (text, reason)
