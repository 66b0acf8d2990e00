"""npm `openai`, and Vercel's `ai` SDK, in node."""

from __future__ import annotations

import json

from tests.clients.deployment import CALL, DIMENSIONS, THOUGHT, WEATHER, Deployment, words
from tests.clients.node import Node

OPENAI, AI = "npm_openai.mjs", "npm_ai.mjs"


def test_openai_streams_what_it_says_whole(node: Node) -> None:
    answer = node.run(OPENAI, "streams")
    assert answer["streamed"] == answer["whole"] == words("hi", 8)
    assert answer["usage"]["completion_tokens"] == 8
    assert node.run(OPENAI, "responds") == words("hi", 8)


def test_openai_calls_a_tool_and_goes_on_with_its_result(node: Node) -> None:
    tool = {"type": "function", "function": WEATHER}
    answer = node.run(OPENAI, "calls", json.dumps(tool))
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["name"] == CALL["name"]
    assert json.loads(call["function"]["arguments"]) == CALL["arguments"]
    assert answer["next"] == words("hi", 2)


def test_openai_cancels_by_leaving(node: Node, world: Deployment) -> None:
    with world.one_job("cancelled"):
        node.run(OPENAI, "leaves")


def test_openai_gets_errors_before_and_in_the_stream(node: Node) -> None:
    answer = node.run(OPENAI, "errors")
    assert (answer["refused"]["name"], answer["refused"]["code"]) == ("NotFoundError", "model_not_found")
    assert (answer["failed"]["name"], answer["failed"]["code"]) == ("APIError", "engine_error")


def test_openai_embeds(node: Node) -> None:
    assert node.run(OPENAI, "embeds") == [DIMENSIONS] * 2


def test_ai_streams_what_it_says_whole(node: Node) -> None:
    answer = node.run(AI, "streams")
    assert answer["streamed"] == answer["whole"] == words("hi", 8)
    assert (answer["reason"], answer["tokens"]) == ("length", 8)


def test_ai_runs_a_tool_and_goes_on_with_its_result(node: Node) -> None:
    answer = node.run(AI, "calls", json.dumps(WEATHER))
    assert answer == {"given": [CALL["arguments"]] * 2, "steps": 2, "text": "Let me look.", "reasoning": THOUGHT}


def test_ai_makes_objects(node: Node) -> None:
    answer = node.run(AI, "objects")
    assert answer.keys() == {"place", "rain"} and isinstance(answer["rain"], bool)


def test_ai_cancels_by_its_signal(node: Node, world: Deployment) -> None:
    with world.one_job("cancelled"):
        node.run(AI, "leaves")


def test_ai_gets_errors_before_and_in_the_stream(node: Node) -> None:
    answer = node.run(AI, "errors")
    assert (answer["refused"]["name"], answer["refused"]["status"]) == ("AI_APICallError", 404)
    assert "nobody" in answer["refused"]["message"]
    assert answer["said"] == "half an answer"
    assert len(answer["failed"]) == 1 and "fail" in answer["failed"][0]
