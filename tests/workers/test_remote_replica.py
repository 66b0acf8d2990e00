"""A replica on a remote server: what is logged, and what becomes of its jobs when the server or the replica is gone."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.errors import EngineFailed
from headrace.broker.messages import Finished, Usage
from headrace.broker.models import RemoteModel
from headrace.workers.engines import remote
from headrace.workers.engines.remote import RemoteEngine
from tests.support import eventually
from tests.workers.remote_server import Server, response, sse
from tests.workers.replicas import MakeStage, Stage

USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}}


def piece(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"text": text, "finish_reason": finish}]}


WHOLE = response(sse(piece("A"), piece("B"), piece("", "stop"), USAGE, "[DONE]"))


def engine_of(server: Server) -> RemoteEngine:
    return RemoteEngine(RemoteModel(name="m", url=server.url))


async def test_text_usage_and_stop_strings_are_as_with_any_engine(stage: Stage) -> None:
    server = Server(WHOLE)
    async with server.up():
        replica = await stage.replica(engine_of(server))
        job_id = await stage.admit()
        ended = await stage.ended(job_id)
        assert (ended.status, ended.usage, await stage.text(job_id)) == ("done", Usage(9, 5), "AB")
        stopped = await stage.admit(stop=["B"])
        await stage.ended(stopped)
        assert await stage.text(stopped) == "A"
        assert await stage.finishes(stopped) == [Finished(0, "stop", "B")]
        await replica.drain()


async def test_an_answer_that_had_begun_is_not_continued_and_one_that_had_not_is_begun_anew(stage: Stage) -> None:
    server = Server([response(sse(piece("A"))), 30.0], [response(b""), 30.0], WHOLE)
    async with server.up():
        replica = await stage.replica(engine_of(server))
        begun = await stage.admit("begun")
        await eventually(lambda: stage.text(begun))
        silent = await stage.admit("silent")
        await eventually(lambda: len(server.requests) == 2)
        await replica.worker.release_all()
        ended = await stage.ended(begun)
        assert ended.error is not None
        assert (ended.status, ended.error.code) == ("failed", "not_continuable")
        assert (await stage.ended(silent)).status == "done"
        assert await stage.text(silent) == "AB"
        await replica.drain()


async def test_a_server_that_is_gone_costs_no_job(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRY_S", (0.05, 0.05))
    stage = await make_stage(step_timeout_s=2.0)
    server = Server(WHOLE)
    async with server.up():
        port = int(server.url.rpartition(":")[2])
        replica = await stage.replica(engine_of(server))
    job_id = await stage.admit()
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(replica.task, 15)
    status = await stage.plain.status(job_id)
    assert status is not None
    assert (status.state, status.deaths) == ("waiting", 0)
    async with server.up(port):
        successor = await stage.replica(engine_of(server))
        assert (await stage.ended(job_id)).status == "done"
        await successor.drain()
