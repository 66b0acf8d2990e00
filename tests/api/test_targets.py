"""What Prometheus is told of where the metrics are, and what a pod asks the broker for them."""

from __future__ import annotations

import asyncio

from headrace.api.pod import Pod
from headrace.broker.memory import MemoryBroker
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import QueueSettings, Settings
from tests.api.conftest import Deploy
from tests.api.deployment import count
from tests.faults import FaultyBroker
from tests.support import eventually

QUEUE = QueueSettings(lease_s=0.3)
SETTINGS = Settings([ScriptedModel(name="targets")], queue=QUEUE)


async def test_every_pod_lists_pods_and_replicas_that_are_there(deploy: Deploy) -> None:
    up = await deploy(queue={"lease_s": 2.0}, pods=2, workers=0)
    await up.broker.present(
        "replicas", "r-1", "scripted", {"model": "scripted", "metrics": "10.0.0.7:9100", "host": "h"}
    )
    await up.broker.present("replicas", "r-2", "scripted", {"model": "scripted", "metrics": "", "host": "h"})
    pods = sorted(pod.url.removeprefix("http://") for pod in up.pods)
    for pod in range(2):
        answer = await up.ask("GET", "/metrics/targets", pod)
        assert answer.headers["content-type"] == "application/json"
        assert [each for each in answer.json if each["labels"]["__meta_headrace_role"] == "replica"] == [
            {
                "targets": ["10.0.0.7:9100"],
                "labels": {
                    "__meta_headrace_role": "replica",
                    "__meta_headrace_host": "h",
                    "__meta_headrace_model": "scripted",
                },
            }
        ]
        found = [each["targets"][0] for each in answer.json if each["labels"]["__meta_headrace_role"] == "pod"]
        assert found == pods

    async def is_gone() -> bool:
        return len((await up.ask("GET", "/metrics/targets")).json) == 2

    await eventually(is_gone)


async def test_however_many_ask_the_broker_is_asked_once_a_second() -> None:
    faults = FaultyBroker(MemoryBroker(QUEUE))
    pod = Pod(SETTINGS, faults.broker)
    await pod.start()
    await asyncio.gather(*(pod.observe() for _ in range(20)))
    assert faults.calls.count("stats") == 1
    await eventually(lambda: faults.calls.count("ping") >= 3)
    await pod.observe()
    assert faults.calls.count("stats") == 2
    await pod.close()


async def test_what_a_broker_that_is_away_had_is_not_shown() -> None:
    faults = FaultyBroker(MemoryBroker(QUEUE))
    pod = Pod(SETTINGS, faults.broker)
    await pod.start()
    await pod.observe()
    name = {"model": "targets"}
    assert count("headrace_replicas", state="ready", **name) == 0
    await faults.broker.present("replicas", "r", "targets", {"model": "targets", "state": "ready"})
    faults.down |= {"ping"}
    await eventually(lambda: count("headrace_broker_up") == 0)
    await pod.observe()
    from prometheus_client import REGISTRY

    assert REGISTRY.get_sample_value("headrace_replicas", {**name, "state": "ready"}) is None
    assert count("headrace_autoscaler_enabled", **name) == 0
    faults.down.clear()
    await eventually(lambda: count("headrace_broker_up") == 1)
    await pod.close()


async def test_replicas_that_come_are_counted_by_every_pod() -> None:
    broker = MemoryBroker(QUEUE)
    before = count("headrace_replica_starts_total", model="targets")
    pod = Pod(SETTINGS, broker)
    await pod.start()
    for replica in ("a", "b", "a"):
        await broker.present("replicas", replica, "targets", {"model": "targets", "state": "starting"})
    await pod.observe()
    assert count("headrace_replica_starts_total", model="targets") == before + 2
    await pod.close()
