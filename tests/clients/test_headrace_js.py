"""client/js/headrace.js in node, over real pods and connections that break."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.clients.deployment import CALL, THOUGHT, Deployment, words
from tests.clients.node import Node
from tests.cutting import cutting

SCRIPT = "headrace_js.mjs"


def test_it_streams_and_calls_tools(node: Node) -> None:
    seen = node.run(SCRIPT, "streams")
    assert seen == {"text": words("hi", 8), "reasoning": "", "calls": [], "finishReason": "length", "tokens": 8}
    seen = node.run(SCRIPT, "calls")
    assert (seen["text"], seen["reasoning"], seen["finishReason"]) == ("Let me look.", THOUGHT, "tool_calls")
    assert seen["calls"][0]["function"]["name"] == CALL["name"]


@pytest.mark.parametrize("task", ["leaves", "aborts", "abortsAtOnce"])
def test_leaving_and_aborting_cancel_the_job(node: Node, world: Deployment, task: str) -> None:
    with world.one_job("cancelled"):
        answer = node.run(SCRIPT, task)
    if task != "leaves":
        assert (answer["name"], answer["isOurs"]) == ("AbortError", False)


def test_a_job_is_cancelled_by_its_id_on_another_pod(node: Node, world: Deployment) -> None:
    with world.one_job("cancelled"):
        answer = node.run(SCRIPT, "cancels")
    assert answer["was"] == "running"
    assert (answer["error"]["isOurs"], answer["error"]["code"]) == (True, "cancelled")


def test_errors_are_its_own(node: Node, world: Deployment) -> None:
    with world.no_job():
        refused = node.run(SCRIPT, "refused")
    assert refused == {"name": "HeadraceError", "code": "model_not_found", "status": 404, "isOurs": True}
    failed = node.run(SCRIPT, "fails")
    assert failed == {"name": "HeadraceError", "code": "engine_error", "status": 0, "isOurs": True}
    assert node.run(SCRIPT, "giveUp")["isOurs"] is False


async def test_an_answer_cut_at_many_places_is_whole_and_made_once(node: Node, world: Deployment) -> None:
    chance = random.Random(5)
    for _ in range(3):
        # also before the headers have come, which are some 300 bytes
        limits = [chance.randrange(0, 4000) for _ in range(6)]
        async with cutting(world.urls[0], limits) as one, cutting(world.urls[1], limits) as two:
            with world.one_job():
                seen = await asyncio.to_thread(node.run, SCRIPT, "resumes", f"{one} {two}")
        assert not limits
        assert (seen["text"], seen["tokens"], seen["finishReason"]) == (words("hi", 60), 60, "length")
        assert len(seen["places"]) >= 1
