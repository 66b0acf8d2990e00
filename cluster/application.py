"""What a Serve configuration file imports: the application of one model, on a Ray cluster that others run (KubeRay).

The configuration is read on each node, from its own file and environment, so that no password passes through Ray.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from headrace.broker import settings
from headrace.broker.errors import ConfigError
from headrace.broker.settings import Settings
from headrace.cluster.deployment import deployment_of
from headrace.cluster.replica import Replica


class NodeReplica(Replica):
    """A replica that finds its configuration where it runs."""

    async def __init__(self, config: str, model: str) -> None:  # type: ignore[misc]  # Serve awaits it
        read = _read(config)
        assert read.redis.url is not None  # `_read` refuses that
        await super().__init__(msgspec.to_builtins(read), model, read.redis.url)


def build(args: dict[str, str]) -> Any:
    """The Serve application of `args["model"]`, as the file `args["config"]` has it.

    Raises ConfigError, also if the broker's place is not said: there is no embedded server on a cluster.
    """
    unknown = sorted(args.keys() ^ {"config", "model"})
    if unknown:
        raise ConfigError(f"args: config and model must be given, and nothing else; wrong: {', '.join(unknown)}")
    read = _read(args["config"])
    model = read.model(args["model"])
    given = {"config": args["config"], "model": model.name}
    deployment = deployment_of(read, model, "headrace.cluster.node_policy:NodePolicy", given, NodeReplica)
    return deployment.bind(*given.values())


def _read(config: str) -> Settings:
    read = settings.load(config, os.environ)
    if read.redis.url is None:
        raise ConfigError(f"{config}: redis.url: None is for one machine; set it, or HEADRACE_REDIS__URL")
    return read
