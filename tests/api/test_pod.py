"""A pod's own loops, without HTTP."""

from __future__ import annotations

import pytest

from headrace.api.pod import Pod
from headrace.broker.errors import BrokerDown, BrokerFull
from headrace.broker.memory import MemoryBroker
from headrace.broker.metrics import BROKER_UP
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import QueueSettings, Settings
from tests.faults import FaultyBroker
from tests.support import eventually

QUEUE = QueueSettings(lease_s=0.2)
SETTINGS = Settings([ScriptedModel(name="m")], queue=QUEUE)


class FullBroker(MemoryBroker):
    async def ping(self) -> float:
        return 0.9


async def test_a_full_broker_takes_nothing_new_and_what_has_run_out_still_ends() -> None:
    faults = FaultyBroker(FullBroker(QUEUE))
    pod = Pod(SETTINGS, faults.broker)
    await pod.start()
    with pytest.raises(BrokerFull):
        pod.require_broker()
    assert BROKER_UP._value.get() == 1
    await eventually(lambda: "reap" in faults.calls)
    await pod.close()


async def test_a_pod_that_has_no_broker_waits_for_it_and_reaps_nothing() -> None:
    faults = FaultyBroker(MemoryBroker(QUEUE))
    faults.down |= {"open", "ping"}
    pod = Pod(SETTINGS, faults.broker)
    await pod.start()
    await eventually(lambda: faults.calls.count("open") >= 2)
    with pytest.raises(BrokerDown):
        pod.require_broker()
    assert BROKER_UP._value.get() == 0
    assert "reap" not in faults.calls
    faults.down.clear()
    await eventually(lambda: "reap" in faults.calls)
    pod.require_broker()
    await pod.close()
