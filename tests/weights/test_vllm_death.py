"""vLLM's engine core is killed under two answers: the replica ends, no job is lost, and another one goes on."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from headrace.broker.errors import EngineDied
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Delta, Usage
from headrace.broker.settings import QueueSettings
from headrace.workers import engines
from tests.support import eventually
from tests.weights.conftest import model_of
from tests.workers.llamacpp_runs import DATA_DIR, NEVER_ENDS
from tests.workers.replicas import Stage

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 40


async def token_ids(stage: Stage, job_id: str) -> list[int]:
    return [token_id for delta in await stage.events(job_id, Delta) for token_id in delta.token_ids]


async def test_the_engine_core_is_killed_and_another_engine_goes_on_at_the_next_token() -> None:
    """The successor is llama.cpp, which has the same vocabulary and is loaded in a second."""
    queue = QueueSettings()
    stage = Stage(MemoryBroker(queue), queue=queue)
    before = set(psutil.Process().children(recursive=True))
    engine = engines.make(model_of("vllm"), DATA_DIR)
    replica = await stage.replica(engine)
    started = set(psutil.Process().children(recursive=True)) - before
    made = {each for each in started if "resource_tracker" not in " ".join(each.cmdline())}  # that is Python's own
    [core] = [each for each in made if "EngineCor" in each.name()]
    jobs = [await stage.admit("A long story about " + what, max_tokens=TOKENS, sampling=NEVER_ENDS) for what in "ab"]

    async def have_begun() -> bool:
        return all([len(await token_ids(stage, job_id)) >= 5 for job_id in jobs])

    await eventually(have_begun, 30)
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        await asyncio.wait_for(replica.task, 10)
    with pytest.raises(EngineDied):
        replica.worker.check_health()
    await eventually(lambda: not any(each.is_running() and each.status() != "zombie" for each in made), 10)
    said = {job_id: await token_ids(stage, job_id) for job_id in jobs}
    for job_id in jobs:
        status = await stage.plain.status(job_id)
        assert status is not None
        assert (status.state, status.deaths) == ("waiting", 1)
        assert 5 <= len(said[job_id]) < TOKENS
    successor = await stage.replica(engines.make(model_of("llamacpp"), DATA_DIR))
    for job_id in jobs:
        ended = await stage.ended(job_id, 60)
        whole = await token_ids(stage, job_id)
        assert (ended.status, len(whole)) == ("done", TOKENS)
        assert whole[: len(said[job_id])] == said[job_id]
        assert isinstance(ended.usage, Usage)
        assert ended.usage.completion_tokens == TOKENS
    await eventually(lambda: successor.worker.running == 0, 10)
    successor.task.cancel()
    await asyncio.wait([successor.task])
