"""From a model's settings to its Serve application, and from Serve's status back to ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from headrace.broker.models import Model
from headrace.broker.settings import Settings
from headrace.cluster import placement
from headrace.cluster.placement import Resources
from headrace.cluster.replica import Replica

_HEALTH_PERIOD_S = 1.0
_SHUTDOWN_MARGIN_S = 5.0


class Deployed(Struct, frozen=True):
    """One model's deployment now. `message` says in one line why it failed, or why it has no place.

    `unplaced`: it has no replica, because no node has room for one.
    """

    model: str
    state: Literal["starting", "ready", "failed", "unplaced"]
    message: str = ""


def deployment_of(
    settings: Settings, model: Model, policy: str, policy_kwargs: dict[str, Any], kind: type[Replica] = Replica
) -> Any:
    """How Serve runs a model's replicas: how many, with what, and how long they may take to end.

    `policy` is the import path of the class that decides how many, if the model has autoscaling.
    """
    from ray import serve

    deployment: Any = serve.deployment(kind)
    return deployment.options(
        name="replica",
        **_number(model, policy, policy_kwargs),
        max_constructor_retry_count=3,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=10.0,
        graceful_shutdown_timeout_s=settings.worker.drain_s + _SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        **placement.options(model),
    )


def _number(model: Model, policy: str, policy_kwargs: dict[str, Any]) -> dict[str, Any]:
    """A fixed number of replicas, or Serve's autoscaling with our policy; its own delays and factors do nothing."""
    if model.autoscaling is None:
        return {"num_replicas": model.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    make: Any = AutoscalingPolicy
    return {
        "num_replicas": "auto",
        "autoscaling_config": AutoscalingConfig(
            min_replicas=model.autoscaling.min_replicas,
            initial_replicas=model.replicas,
            max_replicas=model.autoscaling.max_replicas,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            downscale_to_zero_delay_s=0.0,
            policy=make(policy_function=policy, policy_kwargs=policy_kwargs),
        ),
    }


def deployed(models: Sequence[Model]) -> list[Deployed]:
    """What Serve says of each model."""
    from ray import serve

    applications, nodes = serve.status().applications, _nodes()
    return [_deployed(model, applications[model.name], nodes) for model in models if model.name in applications]


def _deployed(model: Model, application: Any, nodes: Sequence[Resources]) -> Deployed:
    message = " ".join(" ".join(each.message.split()) for each in application.deployments.values())
    match application.status.value:
        case "RUNNING":
            return Deployed(model.name, "ready")
        case "DEPLOY_FAILED":
            return Deployed(model.name, "failed", _reason(message))
    # UNHEALTHY too: a replica was lost, and Serve starts another, which may take minutes
    if not any(each.replica_states.get("RUNNING") for each in application.deployments.values()):
        # what Serve says, after a while, of a replica that Ray has no place for; one that it has is "to initialize"
        now = placement.why_not_now(model) if "to be scheduled" in message else ""
        if why := placement.why_not(model, nodes) or now:
            return Deployed(model.name, "unplaced", why)
    return Deployed(model.name, "starting")


def _nodes() -> list[Resources]:
    import ray

    alive: Any = ray.nodes  # untyped
    return [each["Resources"] for each in alive() if each["Alive"]]


def _reason(message: str) -> str:
    """The last words of Ray's message, which is a traceback with ours at its end."""
    return message[-300:]
