"""What Ray is asked for, and what is said if it has no room."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.broker.memory import MemoryBroker
from headrace.broker.models import Model, ScriptedModel
from headrace.broker.settings import QueueSettings
from headrace.cluster import placement
from headrace.cluster.deployment import Deployed
from headrace.cluster.watch import FAILED, Watch

T4, A100 = {"accelerator_type:T4": 1.0}, {"accelerator_type:A100": 1.0}


def model(**fields: Any) -> Model:
    return ScriptedModel(name="m", **fields)


def test_one_rank_is_an_actor_that_may_share_a_gpu() -> None:
    asked = placement.options(model(gpus=0.5, cpus=2.0, accelerator="T4"))
    assert asked == {"ray_actor_options": {"num_cpus": 2.0, "num_gpus": 0.5, "accelerator_type": "T4"}}


def test_the_ranks_of_one_node_are_one_actor_that_has_all_gpus() -> None:
    asked = placement.options(model(gpus=4, tensor_parallel=4))
    assert asked == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 4}}


def test_ranks_of_many_nodes_are_a_bundle_each() -> None:
    asked = placement.options(model(gpus=4, tensor_parallel=2, pipeline_parallel=2, accelerator="A100"))
    bundle = {"CPU": 1.0, "GPU": 1.0, "accelerator_type:A100": 0.001}
    assert asked == {
        "ray_actor_options": {"num_cpus": 1.0},
        "placement_group_bundles": [bundle] * 4,
        "placement_group_strategy": "PACK",
    }


def test_stages_may_be_kept_on_one_node() -> None:
    asked = placement.options(model(gpus=2, pipeline_parallel=2, strategy="STRICT_PACK"))
    assert asked == {"ray_actor_options": {"num_cpus": 1.0, "num_gpus": 2}}


NODES = [{"CPU": 8.0, "GPU": 1.0, **T4}, {"CPU": 8.0, "GPU": 2.0, **A100}, {"CPU": 8.0}]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"cpus": 9}, "no node has 9 CPUs"),
        ({"gpus": 2, "tensor_parallel": 2}, ""),
        ({"gpus": 3}, "no node has 3 GPUs and 1 CPU"),
        ({"gpus": 1, "accelerator": "T4"}, ""),
        ({"gpus": 2, "accelerator": "T4"}, "no node has 2 GPUs of the kind T4 and 1 CPU"),
        ({"gpus": 1, "accelerator": "H100"}, "no node has 1 GPU of the kind H100 and 1 CPU"),
        ({"gpus": 3, "pipeline_parallel": 3}, ""),
        ({"gpus": 4, "pipeline_parallel": 4}, "the nodes have not got 4 times 1 GPU and 1 CPU"),
        ({"gpus": 2, "pipeline_parallel": 2, "strategy": "STRICT_SPREAD"}, ""),
        (
            {"gpus": 3, "pipeline_parallel": 3, "strategy": "STRICT_SPREAD"},
            "the nodes have not got 3 times 1 GPU and 1 CPU, each on a node of its own",
        ),
    ],
)
def test_the_reason_names_what_is_missing(fields: dict[str, Any], why: str) -> None:
    expected = f"this model cannot be placed: {why}" if why else ""
    assert placement.why_not(model(**fields), NODES) == expected


class Serve:
    """What Serve would say, and a clock."""

    def __init__(self) -> None:
        self.found = Deployed("m", "starting")
        self.now = 0.0
        self.broker = MemoryBroker(QueueSettings())
        self.watch = Watch(self.broker, 30.0, lambda _: [self.found], lambda: self.now)

    async def look(self, state: Any, message: str, after_s: float) -> tuple[str, str]:
        """The state that the watch sees then, and what the broker knows."""
        self.now += after_s
        self.found = replace(self.found, state=state, message=message)
        [found] = await self.watch.once([model()])
        return found.state, (await self.broker.stats("m")).unplaced


async def test_a_place_is_waited_for_and_then_the_reason_is_noted_until_there_is_one() -> None:
    serve = Serve()
    assert await serve.look("unplaced", "no node", 0) == ("starting", "")
    assert await serve.look("unplaced", "no node", 29) == ("starting", "")
    assert await serve.look("unplaced", "no node", 1) == ("unplaced", "no node")
    assert await serve.look("starting", "", 1) == ("starting", "")
    assert await serve.look("unplaced", "no node", 1) == ("starting", "")  # it is waited for anew
    assert await serve.look("failed", "a traceback", 1) == ("failed", FAILED)
    assert await serve.look("ready", "", 1) == ("ready", "")
