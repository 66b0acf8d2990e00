"""Starting while the broker is down."""

from __future__ import annotations

import asyncio
import logging

import pytest

from headrace.broker import waiting
from headrace.broker.errors import ConfigError
from headrace.broker.memory import MemoryBroker
from headrace.broker.settings import QueueSettings
from tests.faults import FaultyBroker
from tests.support import eventually


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> FaultyBroker:
    """A broker that is down, asked a hundred times a second."""
    monkeypatch.setattr(waiting, "_AGAIN_S", 0.01)
    faults = FaultyBroker(MemoryBroker(QueueSettings()))
    faults.down.add("open")
    return faults


async def test_it_is_waited_for_and_said_now_and_then(faults: FaultyBroker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "headrace.broker.waiting")
    opening = asyncio.create_task(waiting.open_when_up(faults.broker, say_every_s=0.2))
    await eventually(lambda: len(faults.calls) > 30)
    assert not opening.done()
    faults.down.clear()
    await asyncio.wait_for(opening, 1)
    said = [record.__dict__["event"] for record in caplog.records]
    assert said[0] == "broker_down"
    assert 2 <= said.count("broker_down") < 10
    assert said[-1] == "broker_up"


async def test_it_is_said_at_most_every_ten_seconds(faults: FaultyBroker, caplog: pytest.LogCaptureFixture) -> None:
    opening = asyncio.create_task(waiting.open_when_up(faults.broker))
    await eventually(lambda: len(faults.calls) > 30)
    opening.cancel()
    await asyncio.wait([opening])
    assert [record.__dict__["event"] for record in caplog.records] == ["broker_down"]


async def test_a_broker_that_is_there_is_opened_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await waiting.open_when_up(MemoryBroker(QueueSettings()))
    assert caplog.records == []


async def test_a_broker_that_must_not_be_used_is_not_waited_for() -> None:
    class Evicting(MemoryBroker):
        async def open(self) -> None:
            raise ConfigError("maxmemory-policy")

    with pytest.raises(ConfigError):
        await waiting.open_when_up(Evicting(QueueSettings()))
