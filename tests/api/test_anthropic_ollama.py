"""Anthropic's and Ollama's routes on real pods: every case that holds for any stream holds for theirs."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import httpx
import pytest

from headrace.broker.settings import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment, Opened
from tests.api.spoken import ALL, MESSAGES, Said, Spoken, assert_continues
from tests.api.test_case_a8_a9 import MESSAGE, BreakingEngine, assert_says_nothing_of_the_inside
from tests.support import eventually

formats = pytest.mark.parametrize("form", ALL, ids=[form.name for form in ALL])


async def post(up: Deployment, form: Spoken, *, pod: int = 0, headers: Any = None, **fields: Any) -> Answer:
    return await up.ask("POST", form.path, pod, json=form.asking(**fields), headers=headers)


async def streamed(up: Deployment, form: Spoken, **fields: Any) -> Said:
    answer = await post(up, form, **fields, stream=True)
    assert (answer.status, answer.headers["content-type"]) == (200, form.media_type)
    return form.of_stream([frame.said for frame in form.read(answer.body)])


async def whole(up: Deployment, form: Spoken, **fields: Any) -> Said:
    answer = await post(up, form, **fields, stream=False)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), answer.body
    return form.of_whole(answer.json)


async def both(up: Deployment, form: Spoken, **fields: Any) -> Said:
    """What is said, streamed and whole, which must be the same."""
    said = await streamed(up, form, **fields)
    assert said == await whole(up, form, **fields)
    return said


async def refused(up: Deployment, form: Spoken, status: int, **request: Any) -> str:
    answer = await up.ask("POST", form.path, **request)
    assert (answer.status, answer.headers["content-type"]) == (status, "application/json"), answer.body
    return form.error(answer.json)


# -- what is said -----------------------------------------------------------------------------------------------------


@formats
async def test_a2_a4_what_splits_lines_or_ends_streams_elsewhere_is_text(deploy: Deploy, form: Spoken) -> None:
    script = ["a\u2028b", "c\u2029d", "e\u0085f", "g\nh", "i\r\nj", "\n\ndata: [DONE]\n\n", "event: error\n", "\0}{"]
    up = await deploy({"script": script})
    assert (await both(up, form)).text == "".join(script)
    assert (await streamed(up, form, limit=3)).text == "".join(script[:3])


@formats
async def test_a6_h1_h2_how_it_ends(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["", "A", "", "B", "STOP", "c"]})
    ended, limited, stopped = form.reasons
    assert await both(up, form) == Said("ABSTOPc", ended, 1, 6)
    assert await both(up, form, limit=2) == Said("A", limited, 1, 2)
    found = await both(up, form, stop=["x", "STOP"])
    assert (found.text, found.reason) == ("AB", stopped)
    assert (await both(up, form, stop=[])).text == "ABSTOPc"


@formats
async def test_b1_b2_half_characters_and_stop_strings_over_tokens(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": [[0xF0, 0x9F], [0x98], [0x80], " o", "k", [0xFF], "x\n", "User", ":", " y"]})
    assert (await both(up, form, stop=["\nUser:"])).text == "😀 ok\ufffdx"
    assert (await both(up, form, limit=1)).text == ""


@formats
async def test_a1_a3_a_silent_stream_is_kept_open(deploy: Deploy, form: Spoken) -> None:
    up = await deploy(
        {"script": ["A", "B"], "tokens_per_s": 3.0}, api={"heartbeat_s": 0.1, "headers_after_ms": 20}, workers=1
    )
    answer = await post(up, form, stream=True)
    assert form.beats(answer.body) >= 2
    assert form.of_stream([frame.said for frame in form.read(answer.body)]).text == "AB"


@formats
@pytest.mark.parametrize("tokens_per_s", [0.0, 20.0], ids=["at_once", "paced"])
async def test_a8_an_answer_that_breaks_says_so(deploy: Deploy, form: Spoken, tokens_per_s: float) -> None:
    up = await deploy({"script": ["A", "B"], "tokens_per_s": tokens_per_s}, engine=BreakingEngine)
    answer = await post(up, form, stream=True)
    *frames, last = form.read(answer.body)
    assert (answer.status, form.error(last.said)) == (200, MESSAGE)
    assert not any(frame.said.get("done") or frame.said.get("type") == "message_stop" for frame in frames)
    assert "".join(form.text(frame.said) for frame in frames) == "AB"
    assert_says_nothing_of_the_inside(answer.body.decode())
    assert await refused(up, form, 500, json=form.asking(stream=False)) == MESSAGE


# -- leaving and coming back ------------------------------------------------------------------------------------------


@formats
async def test_d1_a_client_that_leaves_stops_the_worker(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 50.0}, api={"grace_s": 0.0})
    url = up.pods[0].url + form.path
    async with up.http.stream("POST", url, json=form.asking(limit=10_000, stream=True)) as response:
        opened = Opened(response)
        await opened.until(b'"id":' if form is not MESSAGES else b"text_delta")
    await eventually(lambda: up.workers[0].running == 0, 2.0)
    assert await up.state_of(opened.job) == "cancelled"


@formats
async def test_e9_each_position_is_continued_exactly_on_the_other_pod(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a\u2028", "b", "c", "d"], "tokens_per_s": 200.0}, pods=2)
    answer = await post(up, form, stream=True)
    job, frames = answer.headers["x-request-id"], form.read(answer.body)
    assert answer.headers.get("request-id") == (job if form is MESSAGES else None)
    assert all(frame.id.startswith(job) for frame in frames)
    for index, frame in enumerate(frames):
        by_header = await up.resume(job, frame.id, pod=1)
        by_route = await up.ask("POST", form.path, 1, params={"after": frame.id}, content=b"ignored {")
        for rest in (by_header, by_route):
            assert (rest.status, rest.headers["content-type"]) == (200, form.media_type)
            assert_continues(form, form.read(rest.body), frames[index + 1 :])
    assert len(up.recorded.told) == 1


@formats
async def test_e9_a_stream_is_read_again_in_another_format(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a", "b"]})
    job = (await up.stream()).headers["x-request-id"]
    again = await up.resume(job, format=form.name)
    said = form.of_stream([frame.said for frame in form.read(again.body)])
    assert said == Said("ab", form.reasons[0], 1, 2)


# -- errors -----------------------------------------------------------------------------------------------------------


@formats
async def test_h4_bodies_that_mean_nothing(deploy: Deploy, form: Spoken) -> None:
    up = await deploy()
    bodies = [b'{"model":', b"", b"[]", b'"x"', b"{}", b'{"model":"","messages":[]}', b'{"model":5}', b'{"a":"\xff"}']
    for body in bodies:
        assert await refused(up, form, 400, content=body)
    assert "not valid JSON" in await refused(up, form, 400, content=b'{"temperature":NaN}')
    deep = b'{"model":"scripted","foo":' + b"[" * 100 + b"]" * 100 + b"}"
    assert "deeper" in await refused(up, form, 400, content=deep)
    assert up.recorded.told == []
    assert (await whole(up, form, foo={"deep": [1]}, limit=1)).tokens == 1


@formats
@pytest.mark.parametrize("number", ["1" * 25, "-" + "1" * 25, "1" * 5000, "1e400"], ids=["big", "low", "huge", "float"])
async def test_h7_numbers_that_no_machine_holds(deploy: Deploy, form: Spoken, number: str) -> None:
    up = await deploy()
    schema = {"type": "object", "maximum": "here"}
    fields: dict[str, Any] = {"format": schema}
    if form is MESSAGES:
        fields = {"tools": [{"name": "f", "input_schema": schema}]}
    body = json.dumps(form.asking(**fields)).replace('"here"', number).encode()
    assert await refused(up, form, 400, content=body)
    assert up.recorded.told == [] and await up.is_idle()


@formats
@pytest.mark.parametrize("depth", [500, 3_000, 100_000])
async def test_h7_deep_bodies(deploy: Deploy, form: Spoken, depth: int) -> None:
    up = await deploy()
    body = json.dumps(form.asking(tools="here")).replace('"here"', "[" * depth + "]" * depth).encode()
    assert "deeper" in await refused(up, form, 400, content=body)
    assert up.recorded.told == []


@formats
async def test_h4_addresses_and_methods_in_the_familys_envelope(deploy: Deploy, form: Spoken) -> None:
    up = await deploy()
    missing = await up.ask("GET", form.path + "/nope")
    wrong = await up.ask("GET", form.path)
    assert (missing.status, wrong.status, wrong.headers["allow"]) == (404, 405, "POST")
    assert form.error(missing.json) and form.error(wrong.json)


@formats
async def test_h5_the_content_type_is_not_looked_at(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a"]})
    body = b"\xef\xbb\xbf" + httpx.Request("POST", "http://x", json=form.asking(stream=False)).content
    for kind in ("application/x-www-form-urlencoded", "text/plain", "application/json; charset=utf-8"):
        answer = await up.ask("POST", form.path, content=body, headers={"content-type": kind})
        assert form.of_whole(answer.json).text == "a"


@formats
async def test_h8_what_is_known_early_has_its_own_status(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"context_tokens": 8})
    long = "x" * 40
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": long}], "prompt": long}
    for stream in (True, False):
        message = await refused(up, form, 404, json=form.asking(model="nope", stream=stream))
        assert message.startswith("model 'nope' not found")
        assert "context is 8" in await refused(up, form, 400, json=form.asking(stream=stream, **prompt))


@formats
async def test_h8_no_worker_is_503(deploy: Deploy, form: Spoken) -> None:
    up = await deploy(workers=0)
    answer = await post(up, form, stream=True)
    assert (answer.status, answer.headers["retry-after"]) == (503, "5")
    assert form.error(answer.json)
    if form is MESSAGES:
        assert answer.json["error"]["type"] == "overloaded_error"


@formats
async def test_i2_a_key_in_either_header_and_nowhere_else(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a"]}, keys=[KeySettings("me", hashlib.sha256(b"right").hexdigest())])
    for good in ({"authorization": "Bearer right"}, {"x-api-key": "right"}):
        assert (await post(up, form, headers=good)).status == 200
    bad: list[Any] = [
        {},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
        {"authorization": "Bearer wrong", "x-api-key": "right"},
        [("x-api-key", "right"), ("x-api-key", "right")],
    ]
    for headers in bad:
        answer = await post(up, form, headers=headers)
        assert answer.status == 401 and form.error(answer.json)
    assert (await up.ask("POST", form.path, params={"x-api-key": "right"}, json=form.asking())).status == 401
    assert len(up.recorded.told) == 2


@formats
async def test_the_id_of_the_job_is_in_what_is_about_it(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a"], "script_end": "error"})
    answer = await post(up, form, stream=False)
    assert (answer.status, len(answer.headers["x-request-id"])) == (500, 32)
    if form is MESSAGES:
        assert answer.json["request_id"] == answer.headers["x-request-id"]


@formats
async def test_the_tag_latest_says_nothing(deploy: Deploy, form: Spoken) -> None:
    up = await deploy({"script": ["a"]})
    assert (await whole(up, form, model="scripted:latest")).text == "a"
    assert "not found" in await refused(up, form, 404, json=form.asking(model="scripted:other"))
    up = await deploy({"script": ["a"], "name": "other:latest"})
    assert (await whole(up, form, model="other")).text == "a"
