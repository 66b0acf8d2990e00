"""From a model's settings to its Serve application, and from Serve's status back to ours."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.broker.models import Model
from headrace.broker.settings import Settings
from headrace.cluster.replica import Replica

_HEALTH_PERIOD_S = 1.0
_SHUTDOWN_MARGIN_S = 5.0


class Deployed(Struct, frozen=True):
    """One model's deployment now. `message` says why it failed, in one line."""

    model: str
    state: Literal["starting", "ready", "failed"]
    message: str = ""


def deploy(settings: Settings, worker_url: str, scaler_url: str) -> None:
    """One Serve application per model; returns at once, Serve starts the replicas. The URLs are how each gets there."""
    from ray import serve
    from ray.serve.api import RunTarget

    plain = msgspec.to_builtins(settings)
    targets = []
    for model in settings.models:
        kwargs = {"plain_settings": plain, "model": model.name, "broker_url": scaler_url}
        deployment = deployment_of(settings, model, "headrace.cluster.policy:Policy", kwargs)
        application = deployment.bind(plain, model.name, worker_url)
        targets.append(RunTarget(application, name=model.name, route_prefix=None))
    serve.run_many(targets, wait_for_applications_running=False)


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
        ray_actor_options={"num_cpus": model.cpus, "num_gpus": model.gpus},
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


def deployed() -> list[Deployed]:
    """What Serve says of each model."""
    from ray import serve

    found = []
    for name, application in serve.status().applications.items():
        message = " ".join(" ".join(each.message.split()) for each in application.deployments.values())
        match application.status.value:
            case "RUNNING":
                found.append(Deployed(name, "ready"))
            case "DEPLOY_FAILED":
                found.append(Deployed(name, "failed", _reason(message)))
            case _:  # UNHEALTHY too: a replica was lost, and Serve starts another, which may take minutes
                found.append(Deployed(name, "starting"))
    return found


def _reason(message: str) -> str:
    """The last words of Ray's message, which is a traceback with ours at its end."""
    return message[-300:]


def undeploy() -> None:
    """Take all applications down; the replicas drain meanwhile, see `is_empty`."""
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client()
    client.delete_all_apps(blocking=False)


def is_empty() -> bool:
    from ray import serve

    return not serve.status().applications
