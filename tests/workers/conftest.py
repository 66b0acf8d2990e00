"""A broker in memory with replicas on it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headrace.broker.memory import MemoryBroker
from headrace.broker.settings import QueueSettings
from tests.workers.replicas import MakeStage, Stage


@pytest.fixture
async def make_stage() -> AsyncIterator[MakeStage]:
    stages: list[Stage] = []

    async def make(
        *, slots: int = 4, lease_s: float = 5.0, max_deaths: int = 3, max_run_s: float = 3600.0, **worker: float
    ) -> Stage:
        queue = QueueSettings(lease_s=lease_s, max_deaths=max_deaths, max_run_s=max_run_s)
        stages.append(stage := Stage(MemoryBroker(queue), slots=slots, queue=queue, **worker))
        return stage

    yield make
    for stage in stages:
        await stage.close()


@pytest.fixture
async def stage(make_stage: MakeStage) -> Stage:
    return await make_stage()
