"""The models that this process has deployed: made what the settings say, again whenever these change.

A model that has not changed is left alone. One that has is updated by Serve, some replicas at a time: those that leave
hand their jobs back, others go on with them.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import msgspec
from msgspec import Struct, structs

from headrace.broker.models import Model, ModelAutoscaling
from headrace.broker.settings import Settings
from headrace.cluster.deployment import deployment_of

log = logging.getLogger(__name__)


class Wanted(Struct, frozen=True):
    """What a model's deployment is made of: its replicas and its policy see no more of the settings than these."""

    model: Model
    replica: Settings
    policy: Settings | None


class Fleet:
    """See the module; everything here blocks."""

    def __init__(self, worker_url: str, scaler_url: str) -> None:
        """The URLs are how replicas and policies get to the broker."""
        self._worker_url = worker_url
        self._scaler_url = scaler_url
        self._deployed: dict[str, Wanted] = {}

    def follow(self, settings: Settings) -> None:
        """Deploy what is new or has changed, and take down what is not wanted any more; Serve does it from then on."""
        from ray import serve
        from ray.serve.api import RunTarget

        wanted = {model.name: wanted_of(settings, model) for model in settings.models}
        changed = [name for name, each in wanted.items() if self._deployed.get(name) != each]
        targets = [RunTarget(self._application(wanted[name]), name=name, route_prefix=None) for name in changed]
        if targets:
            serve.run_many(targets, wait_for_applications_running=False)
        self._take_down([name for name in self._deployed if name not in wanted])
        self._deployed = wanted
        log.info("deployed: %s", ", ".join(changed), extra={"event": "deployed"})

    def end(self) -> None:
        """Take everything down; the replicas drain meanwhile, see `is_there`."""
        self._take_down(list(self._deployed))

    def is_there(self) -> bool:
        """Is anything left of what was deployed?"""
        return bool(_applications() & self._deployed.keys())

    def _application(self, wanted: Wanted) -> Any:
        plain, name = msgspec.to_builtins(wanted.replica), wanted.model.name
        kwargs = {
            "plain_settings": msgspec.to_builtins(wanted.policy), "model": name, "broker_url": self._scaler_url,
        }  # fmt: skip
        deployment = deployment_of(wanted.replica, wanted.model, "headrace.cluster.policy:Policy", kwargs)
        # Serve would start all replicas anew for a new number of them; it compares this word
        version = hashlib.sha256(msgspec.json.encode([plain, self._worker_url])).hexdigest()[:16]
        return deployment.options(version=version, _internal=True).bind(plain, name, self._worker_url)

    def _take_down(self, models: list[str]) -> None:
        from ray.serve.context import _get_global_client

        client: Any = _get_global_client()
        there = _applications()
        client.delete_apps([name for name in models if name in there], blocking=False)


def wanted_of(settings: Settings, model: Model) -> Wanted:
    """Replicas start anew only for what they themselves are told; who shares the GPUs is known to policies only."""
    slo = ModelAutoscaling(ttft_slo_s=model.autoscaling.ttft_slo_s) if model.autoscaling else None
    own = structs.replace(model, replicas=1, autoscaling=slo)
    scaled = [each for each in settings.models if each.autoscaling is not None]
    return Wanted(
        model,
        structs.replace(settings, models=[own], keys=[]),
        structs.replace(settings, models=scaled, keys=[]) if model in scaled else None,
    )


def _applications() -> set[str]:
    from ray import serve

    return set(serve.status().applications)
