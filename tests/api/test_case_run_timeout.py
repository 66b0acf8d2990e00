"""What a client sees of a job that ran for longer than it may."""

from __future__ import annotations

from tests.api import reading
from tests.api.conftest import Deploy
from tests.workers.replicas import oracle_text

QUEUE = {"max_run_s": 0.4, "lease_s": 0.3}


async def test_a_response_in_one_piece_is_a_504(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 20.0}, QUEUE)
    answer = await up.post(max_tokens=1000)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (504, "run_timeout", "server_error")


async def test_a_stream_ends_with_an_error_frame_after_what_was_made(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 20.0}, QUEUE)
    answer = await up.stream(max_tokens=1000)
    assert [error["code"] for error in reading.errors(answer.events)] == ["run_timeout"]
    made = reading.content(answer.events)
    assert made
    assert oracle_text("hi", 1000).startswith(made)
    assert not any(reading.finishes(answer.events))
