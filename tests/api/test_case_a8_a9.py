"""A8, A9: an answer that broke is not taken for a whole one, and nothing is held back on the way."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import time
from typing import Any

import openai
import pytest

from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, RecordingEngine, count
from tests.api.reading import content, finishes, frames

routes = pytest.mark.parametrize("route", PATHS)
MESSAGE = "The engine failed while it worked on this request."


class BreakingEngine(RecordingEngine):
    """Fails after its script as code fails that nobody expected to."""

    def _step(self, sequence: Any) -> bool:
        if super()._step(sequence):
            return True
        sequence.fail(RuntimeError("boom at /srv/app/x.py"))
        return False

    def _end(self, sequence: Any) -> None:  # type: ignore[override]
        return None


def assert_says_nothing_of_the_inside(text: str) -> None:
    assert not any(word in text for word in ("boom", "/srv", ".py", "RuntimeError", "Traceback", "EngineFailed"))


def outcomes(route: str) -> dict[str, float]:
    labels = {"route": PATHS[route], "model": "scripted"}
    return {outcome: count("headrace_requests_total", outcome=outcome, **labels) for outcome in ("ok", "engine_error")}


@routes
@pytest.mark.parametrize("tokens_per_s", [0.0, 20.0], ids=["at_once", "paced"])
async def test_a8_a_stream_that_breaks_says_so_after_its_text(deploy: Deploy, route: str, tokens_per_s: float) -> None:
    """However fast it breaks: what a client sees depends on the log, not on when it was read."""
    up = await deploy({"script": ["A", "B"], "tokens_per_s": tokens_per_s}, engine=BreakingEngine)
    before = outcomes(route)
    answer = await up.stream(route)
    assert answer.status == 200
    error = {"message": MESSAGE, "type": "server_error", "param": None, "code": "engine_error"}
    assert frames(answer.events)[-1] == {"error": error}
    assert content(answer.events) == "AB" and set(finishes(answer.events)) == {None}
    assert_says_nothing_of_the_inside(answer.body.decode())
    assert outcomes(route) == {"ok": before["ok"], "engine_error": before["engine_error"] + 1}


@routes
async def test_a8_a_whole_response_that_breaks_is_an_error(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["A", "B"]}, engine=BreakingEngine)
    before = outcomes(route)
    answer = await up.post(route)
    assert answer.status == 500
    assert answer.error == {"message": MESSAGE, "type": "server_error", "param": None, "code": "engine_error"}
    assert_says_nothing_of_the_inside(answer.body.decode())
    assert outcomes(route) == {"ok": before["ok"], "engine_error": before["engine_error"] + 1}


@routes
async def test_a8_who_comes_back_after_the_end_sees_the_same(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["A", "B"], "tokens_per_s": 50.0}, pods=2, engine=BreakingEngine)
    first = await up.stream(route)
    job = first.headers["x-request-id"]
    assert (await up.resume(job, pod=1)).events == first.events
    rest = await up.resume(job, first.events[1].id, pod=1)
    assert rest.status == 200 and rest.events == first.events[2:]


async def test_a8_the_official_client_raises(deploy: Deploy) -> None:
    up = await deploy({"script": ["A", "B"], "tokens_per_s": 50.0}, engine=BreakingEngine)
    said = []
    async with openai.AsyncOpenAI(base_url=f"{up.pods[0].url}/v1", api_key="-", max_retries=0) as client:
        with pytest.raises(openai.APIError, match=MESSAGE):
            async for chunk in await client.completions.create(model="scripted", prompt="hi", stream=True):
                said.append(chunk.choices[0].text)
        with pytest.raises(openai.InternalServerError, match=MESSAGE):
            await client.completions.create(model="scripted", prompt="hi")
    assert said == ["A", "B"]


@routes
async def test_a9_headers_and_tokens_are_not_held_back(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["1", "2", "3", "4", "5"], "tokens_per_s": 5.0, "prefill_tokens_per_s": 1.0})
    asked, came = time.monotonic(), {}
    request: dict[str, Any] = {"json": up.body(route, stream=True), "headers": {"accept-encoding": "gzip"}}
    async with up.http.stream("POST", up.pods[0].url + PATHS[route], **request) as response:
        assert time.monotonic() - asked < 0.6
        async for part in response.aiter_raw():
            for token in re.findall(rb'":"([1-5])"', part):
                came[int(token)] = time.monotonic() - asked
    assert list(came) == [1, 2, 3, 4, 5]
    late = [at - (0.8 + 0.2 * token) for token, at in came.items()]  # the first is made after a second
    assert min(late) > -0.05 and max(late) < 0.3
    headers = response.headers
    assert (headers["content-type"], headers["cache-control"]) == ("text/event-stream", "no-cache")
    assert headers["x-accel-buffering"] == "no"
    assert not {"content-encoding", "content-length"} & set(headers)


async def test_a9_small_writes_are_not_delayed_by_the_kernel(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0}, api={"grace_s": 0})
    async with up.open(max_tokens=100) as opened:
        await opened.until(b"content")
        [connection] = up.pods[0].server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_a9_a_burst_of_streams_has_short_gaps(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0})

    async def gaps() -> list[float]:
        async with up.open(max_tokens=30) as opened:
            times = [time.monotonic() async for _ in opened.response.aiter_raw()]
        return [after - before for before, after in itertools.pairwise(times)]

    measured = sorted(gap for each in await asyncio.gather(*(gaps() for _ in range(20))) for gap in each)
    assert measured[len(measured) // 2] < 0.06 and measured[-1] < 0.5
