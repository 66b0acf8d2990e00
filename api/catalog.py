"""The models that a caller may use: others are, to that caller, not there."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from headrace.api import auth
from headrace.api.pod import Pod
from headrace.broker.errors import ModelNotFound
from headrace.broker.models import Model


def models_of(pod: Pod, request: HTTPConnection) -> list[Model]:
    """The models that the caller's key may use, as they are configured."""
    allowed = auth.caller_of(request).models
    return [model for model in pod.settings.served() if allowed is None or model.name in allowed]


def model_of(pod: Pod, request: HTTPConnection, name: str) -> Model:
    """The model of a name or an alias, in which the tag `latest` says nothing; raises ModelNotFound."""
    for model in models_of(pod, request):
        if name in (model.name, f"{model.name}:latest", model.name.removesuffix(":latest"), *model.aliases):
            return model
    raise ModelNotFound(f"model {name[:128]!r} not found; GET /v1/models lists what there is", param="model")


def chosen(pod: Pod, request: HTTPConnection, name: str) -> Model:
    """The model that a request means. Only formats that need not name one leave `name` empty: `?model=` says it then,
    or it is the first one."""
    if name := name or request.query_params.get("model") or "":
        return model_of(pod, request, name)
    models = models_of(pod, request)
    if not models:
        raise ModelNotFound("there is no model that this key may use", param="model")
    return models[0]
