"""Where the metrics of a deployment are, for Prometheus's HTTP service discovery: every pod and replica that is there.

Format: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

from msgspec import Struct

from headrace.broker.protocol import Broker


class Target(Struct, frozen=True):
    """One process, and what is known of it before it is asked."""

    targets: list[str]
    labels: dict[str, str]


async def targets(broker: Broker) -> list[Target]:
    """In a stable order; raises BrokerDown, and then Prometheus keeps what it has."""
    pods, replicas = await broker.listing("pods"), await broker.listing("replicas")
    found = [_target("pod", urlsplit(about.get("url", "")).netloc, about) for about in pods.values()]
    found += [_target("replica", about.get("metrics", ""), about) for about in replicas.values()]
    return sorted((each for each in found if each.targets != [""]), key=lambda each: each.targets)


def _target(role: str, location: str, about: Mapping[str, str]) -> Target:
    labels = {"__meta_headrace_role": role, "__meta_headrace_host": about.get("host", "")}
    if role == "replica":
        labels["__meta_headrace_model"] = about.get("model", "")
    return Target([location], labels)
