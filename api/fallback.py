"""A model that refuses a request, and others that answer in its place."""

from __future__ import annotations

import logging

from msgspec import structs
from starlette.requests import HTTPConnection

from headrace.api import catalog, estimate
from headrace.api.pod import Pod
from headrace.broker import metrics
from headrace.broker.errors import NoCapacity, QueueFull
from headrace.broker.models import Model
from headrace.broker.protocol import Admission, Admitted

log = logging.getLogger(__name__)


async def admit(pod: Pod, request: HTTPConnection, admission: Admission, model: Model) -> tuple[Admission, Admitted]:
    """Admit a job; if its model refuses it, in the way that `fallback_on` names, as one of a fallback's.

    Answers what was admitted, in which the model may be another one that the caller may use. If all refuse, raises what
    the first one said.
    """
    try:
        return admission, await pod.broker.admit(admission)
    except (NoCapacity, QueueFull) as error:
        if error.code not in model.fallback_on:
            raise
        refused = error
    allowed = catalog.models_of(pod, request)
    for other in [each for name in model.fallbacks for each in allowed if each.name == name]:
        try:
            instead = _as_of(admission, other)
            admitted = await pod.broker.admit(instead)
        except (NoCapacity, QueueFull):
            continue
        metrics.FALLBACKS.labels(model.name, other.name).inc()
        log.info("job %s: %s in place of %s", admission.job.id, other.name, model.name, extra={"event": "fallback"})
        return instead, admitted
    raise refused


def _as_of(admission: Admission, model: Model) -> Admission:
    job = structs.replace(admission.job, model=model.name)
    view = structs.replace(admission.view, model=model.name)
    cost = estimate.cost_tokens(job, model.context_tokens)
    return structs.replace(admission, job=job, view=view, cost_tokens=cost)
