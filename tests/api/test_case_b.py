"""B1, B2, B4: the text that reaches a client, wherever tokens are cut, and wherever its connection is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Deploy
from tests.api.deployment import PATHS, Answer, Deployment
from tests.api.reading import content, finishes, text_of
from tests.support import eventually

routes = pytest.mark.parametrize("route", PATHS)
FAMILY = "👨‍👩‍👧‍👦"
SPLIT = [[0xF0, 0x9F], [0x98], [0x80], " ok", [0xE6, 0xAD], [0xAA]]
SHORT = pytest.mark.parametrize("tokens_per_s", [0.0, 300.0], ids=["in_bursts", "one_by_one"])


async def assert_answer(up: Deployment, route: str, fields: dict[str, Any], text: str, reason: str) -> Answer:
    """Stream, whole response and every resume say the same."""
    answer = await up.stream(route, **fields)
    assert (content(answer.events), finishes(answer.events)[-1]) == (text, reason)
    whole = (await up.post(route, **fields)).json
    assert (text_of(whole["choices"][0]), whole["choices"][0]["finish_reason"]) == (text, reason)
    await assert_resumes(up, answer)
    return answer


async def assert_resumes(up: Deployment, answer: Answer) -> None:
    """From each event on, the other pod says exactly what follows it."""
    job = answer.headers["x-request-id"]
    assert (await up.resume(job, pod=1)).body == answer.body
    for index, event in enumerate(answer.events[:-1]):
        rest = await up.resume(job, event.id, pod=1)
        assert rest.events == answer.events[index + 1 :]


@routes
@SHORT
@pytest.mark.parametrize(
    ("script", "fields", "text", "reason"),
    [
        (SPLIT, {}, "😀 ok歪", "stop"),
        (SPLIT, {"max_tokens": 1}, "", "length"),
        (SPLIT, {"max_tokens": 5}, "😀 ok", "length"),
        (["a", [0xFF], "b"], {}, "a\ufffdb", "stop"),
        ([[byte] for byte in FAMILY.encode()], {}, FAMILY, "stop"),
    ],
    ids=["split", "half", "half_at_the_end", "invalid", "family"],
)
async def test_b1_characters_come_whole(
    deploy: Deploy,
    route: str,
    tokens_per_s: float,
    script: list[Any],
    fields: dict[str, Any],
    text: str,
    reason: str,
) -> None:
    up = await deploy({"script": script, "tokens_per_s": tokens_per_s}, pods=2)
    usage = {"stream_options": {"include_usage": True}}
    answer = await assert_answer_with_usage(up, route, fields, usage, text, reason)
    tokens = fields.get("max_tokens", len(script))
    assert answer.events[-2].json["usage"]["completion_tokens"] == tokens
    for event in answer.events[:-1]:
        event.data.encode()  # a lone surrogate cannot be encoded
        assert "\ufffd" in text or ("\ufffd" not in event.data and "\\ufffd" not in event.data)


async def assert_answer_with_usage(
    up: Deployment, route: str, fields: dict[str, Any], usage: dict[str, Any], text: str, reason: str
) -> Answer:
    await assert_answer(up, route, fields, text, reason)
    answer = await up.stream(route, **fields, **usage)
    assert content(answer.events) == text
    await assert_resumes(up, answer)
    return answer


STOPS = [
    (["ABC", "DEF", "G", "HI", "J", "KL"], ["DEFGHIJ"], "ABC", 5),
    (["x\n", "User", ":", " y"], "\nUser:", "x", 3),
    (["fooST", "OPbar"], ["STOP"], "foo", 2),
    (["aXbY"], ["Y", "X"], "a", 1),
]


@routes
@SHORT
@pytest.mark.parametrize(("script", "stop", "text", "needed"), STOPS, ids=["long", "newline", "inside", "earliest"])
async def test_b2_nothing_of_a_stop_string_is_sent(
    deploy: Deploy,
    route: str,
    tokens_per_s: float,
    script: list[str],
    stop: str | list[str],
    text: str,
    needed: int,
) -> None:
    up = await deploy({"script": [*script, *" and more" * 20], "tokens_per_s": tokens_per_s}, pods=2)
    await assert_answer(up, route, {"stop": stop}, text, "stop")
    if tokens_per_s:
        assert up.recorded.tokens == 2 * needed  # the engine was stopped at once, in both runs


@routes
async def test_b2_what_only_began_like_a_stop_string_is_sent(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["foo", "ST", "AR", "ST"], "tokens_per_s": 300.0}, pods=2)
    await assert_answer(up, route, {"stop": "STOP"}, "fooSTARST", "stop")


@routes
@pytest.mark.parametrize("stop", [{}, {"stop": None}, {"stop": []}, {"stop": ["nothing"]}], ids=str)
async def test_b4_special_tokens_make_no_text(deploy: Deploy, route: str, stop: dict[str, Any]) -> None:
    up = await deploy({"script": ["Hi", "<|im_end|>"], "tokens_per_s": 300.0}, pods=2)
    answer = await assert_answer(up, route, stop, "Hi", "stop")
    assert b"im_end" not in answer.body


@routes
async def test_b4_ordinary_text_with_the_same_letters_is_kept(deploy: Deploy, route: str) -> None:
    up = await deploy({"script": ["Hi", "<|im", "_end|>", "!"], "tokens_per_s": 300.0}, pods=2)
    await assert_answer(up, route, {}, "Hi<|im_end|>!", "stop")


@pytest.mark.parametrize("cut", range(6))
async def test_b1_a_job_that_is_handed_on_in_the_middle_of_a_character_is_whole(deploy: Deploy, cut: int) -> None:
    """The next attempt finds half a character in the log, and goes on with the other half."""
    up = await deploy({"script": SPLIT, "tokens_per_s": 20.0}, pods=2)
    async with up.open("completions") as opened:
        await eventually(lambda: up.recorded.tokens >= cut)
        await up.workers[0].release_all()
        answer = await opened.rest()
    assert content(answer.events) == "😀 ok歪"
    assert answer.body == (await up.resume(opened.job, pod=1)).body
    assert len({event.id for event in answer.events}) == len(answer.events)
    status = await up.broker.status(opened.job)
    assert status is not None and status.attempt == 2
