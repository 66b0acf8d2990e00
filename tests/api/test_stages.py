"""What a pod knows of a request's stages: the same for every reader, and taken from the log alone."""

from __future__ import annotations

import asyncio

from headrace.api.relay import StreamReply
from headrace.api.stages import Stages
from headrace.broker.messages import (
    AnyEvent,
    Claimed,
    Delta,
    Ended,
    Finished,
    Queued,
    ReadEntry,
    Result,
    Started,
    ToolCallDelta,
    Usage,
)
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually


def staged(*log: tuple[str, int, list[AnyEvent]]) -> Stages:
    stages = Stages()
    for position, at_ms, events in log:
        entry = ReadEntry(position, at_ms, events)
        stages.note(entry)
        stages.note(entry)
    return stages


QUEUED: tuple[str, int, list[AnyEvent]] = ("0-1", 0, [Queued(1_700_000_000_000)])


def test_the_stages_of_an_answer() -> None:
    found = staged(
        QUEUED,
        ("1-0", 20, [Claimed("w", "0-1")]),
        ("1-1", 30, [Started(12, 4)]),
        ("1-2", 90, [Delta(0, "", [1])]),
        ("1-3", 100, [Delta(0, "a", [2])]),
        ("1-4", 120, [Delta(0, "b", [3]), Finished(0, "stop")]),
        ("1-5", 130, [Ended("done", None, Usage(12, 3, 4))]),
    )
    assert (found.enqueued_ms, found.claimed_ms, found.started_ms, found.first_ms, found.ended_ms) == (
        1_700_000_000_000, 20, 30, 100, 130,
    )  # fmt: skip
    assert (found.attempts, found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (1, 12, 4, 3)
    assert found.tpot_ms == 15.0


def test_after_a_lost_worker_the_first_content_stays_the_first() -> None:
    found = staged(
        QUEUED,
        ("1-0", 10, [Claimed("w", "0-1")]),
        ("1-1", 20, [Started(1)]),
        ("1-2", 30, [Delta(0, "a", [1])]),
        ("5000-0", 5000, [Claimed("x", "1-2")]),
        ("5000-1", 5010, [Started(1)]),
        ("5000-2", 5020, [Delta(0, "b", [2])]),
    )
    assert (found.attempts, found.attempt, found.claimed_ms, found.started_ms, found.first_ms) == (2, 5000, 10, 20, 30)
    assert (found.tpot_ms, found.completion_tokens) == (None, 0)


def test_what_is_content() -> None:
    for event in (Delta(0, "", [1], reasoning="hm"), Delta(0, "", [1], tool_calls=[ToolCallDelta(0, "c")]), Result({})):
        assert staged(("1-1", 7, [event])).first_ms == 7


async def open_streams(up: Deployment, pod: int = 0) -> list[StreamReply]:
    return [stream for stream in up.state(pod).beats if isinstance(stream, StreamReply)]


async def test_a_live_stream_and_one_that_came_late_know_the_same(deploy: Deploy) -> None:
    """The first is told by hints, entry by entry; the second has read the log."""
    up = await deploy({"tokens_per_s": 20.0, "script": ["A", "B", "C", "D"]}, pods=2)
    async with up.open() as opened:
        await opened.until(b'"B"')
        [live] = await open_streams(up)
        late = asyncio.create_task(up.resume(opened.job, pod=1))
        await eventually(lambda: bool(up.jobs(1)))
        [other] = await open_streams(up, 1)
        await opened.rest()
        await late
    for name in Stages.__slots__:
        assert getattr(live.subject.stages, name) == getattr(other.subject.stages, name), name
    found = live.subject.stages
    assert found.claimed_ms is not None and found.started_ms is not None and found.first_ms is not None
    assert 0 <= found.claimed_ms <= found.started_ms <= found.first_ms < (found.ended_ms or 0)
    assert (found.attempts, found.completion_tokens) == (1, 4)


async def test_after_the_first_content_nothing_is_noted_of_a_token(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    async with up.open(max_tokens=20) as opened:
        await opened.until(b"content")
        [stream] = await open_streams(up)
        await eventually(lambda: stream.reader.sink == stream._push)
        await opened.rest()
    assert stream.subject.stages.completion_tokens == 20
