"""Many Ray nodes on one machine, in a process of their own: what each has is declared, and any can be killed.

Argument: nodes as JSON, `{"name": {"num_cpus": 1, "num_gpus": 2, "resources": {...}}}`; the first is the head. Each
line in is `add NAME {...}` or `kill NAME`; each line out is where the cluster is and the nodes by name.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil
from ray.cluster_utils import Cluster

COMMON: dict[str, Any] = {
    "node_ip_address": "127.0.0.1",
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
    "include_log_monitor": False,
}


class Nodes:
    """See the module."""

    def __init__(self) -> None:
        self._cluster = Cluster()
        self._nodes: dict[str, Any] = {}

    def add(self, name: str, resources: dict[str, Any]) -> None:
        self._nodes[name] = self._cluster.add_node(**COMMON, **resources)

    def kill(self, name: str) -> None:
        """As if the machine had lost its power: every process of the node ends at once."""
        node = self._nodes.pop(name)
        [raylet] = node.all_processes["raylet"]
        for each in psutil.Process(raylet.process.pid).children(recursive=True):
            each.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def say(self) -> None:
        nodes = {name: node.node_id for name, node in self._nodes.items()}
        sys.stdout.write(json.dumps({"address": self._cluster.address, "nodes": nodes}) + "\n")
        sys.stdout.flush()


def main() -> None:
    nodes = Nodes()
    for name, resources in json.loads(sys.argv[1]).items():
        nodes.add(name, resources)
    nodes.say()
    for line in sys.stdin:
        verb, name, *resources = line.split(maxsplit=2)
        if verb == "kill":
            nodes.kill(name)
        else:
            nodes.add(name, json.loads(resources[0]))
        nodes.say()


if __name__ == "__main__":
    main()
