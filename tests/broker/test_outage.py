"""An outage is said once and when it is over, however often it is met."""

from __future__ import annotations

import logging

import pytest

from headrace.broker import outage
from headrace.broker.errors import BrokerDown
from headrace.broker.memory import MemoryBroker
from headrace.broker.outage import Outage, open_when_up
from headrace.broker.settings import QueueSettings
from tests.faults import FaultyBroker

LOG = logging.getLogger(__name__)


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [str(record.__dict__["event"]) for record in caplog.records]


def test_an_outage_is_said_once_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    one = Outage(LOG, "claim_failed", "no jobs can be claimed")
    for _ in range(100):
        one.down(BrokerDown())
    one.up()
    one.up()
    assert events(caplog) == ["claim_failed", "claim_failed_over"]


def test_a_long_outage_is_said_again(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Outage(LOG, "claim_failed", "no jobs can be claimed")
    one.down(BrokerDown())
    monkeypatch.setattr(outage, "_AGAIN_S", 0.0)
    one.down(BrokerDown())
    assert len(caplog.records) == 2


async def test_opening_waits_for_a_broker_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    broker = FaultyBroker(MemoryBroker(QueueSettings()))
    broker.fail("open", "before", "before")
    await open_when_up(broker.broker)
    assert broker.calls == ["open", "open", "open"]
    assert len(caplog.records) == 1
