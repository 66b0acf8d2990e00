"""OpenAI's addresses that are not about stored responses."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import catalog, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.routes.bare import BareRoute
from headrace.api.wire import BY_NAME
from headrace.api.wire.embeddings import check_dimensions
from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama_models import Known, Replicas, look_up
from headrace.broker.errors import BrokerDown
from headrace.broker.models import Model

_STARTED_S = int(time.time())


def router(pod: Pod) -> APIRouter:
    """What OpenAI's clients speak."""
    routes = APIRouter(prefix="/v1", route_class=BareRoute, dependencies=[GUARD])

    @routes.post("/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["openai.chat"])

    @routes.post("/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["openai.completions"])

    @routes.post("/embeddings", response_class=Response)
    async def embeddings(request: Request) -> Response:
        async def complete(parsed: Parsed) -> Parsed:
            known = look_up(catalog.model_of(pod, request, parsed.job.model), await _replicas(pod))
            check_dimensions(parsed, int(known.about.get("embeddings") or 0))
            return parsed

        return await submit.generate(pod, request, BY_NAME["openai.embeddings"], complete=complete)

    @routes.get("/models")
    async def models(request: Request) -> Response:
        replicas = await _replicas(pod)
        parents = {adapter.name: base.name for base in pod.settings.models for adapter in base.adapters}
        models = catalog.models_of(pod, request)
        rows = [row for model in models for row in _rows(model, replicas, parents.get(model.name))]
        return as_json({"object": "list", "data": rows})

    @routes.get("/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return as_json(_shown(look_up(catalog.model_of(pod, request, name), await _replicas(pod))))

    return routes


async def _replicas(pod: Pod) -> Replicas:
    """What replicas say of themselves; nothing while the broker is away: then there is what is configured."""
    try:
        return await pod.broker.listing("replicas")
    except BrokerDown:
        return {}


def _rows(model: Model, replicas: Replicas, parent: str | None) -> list[dict[str, object]]:
    """A model, and each of its aliases, whose `root` it is; an adapter has a `parent`. Both are vLLM's words."""
    shown = _shown(look_up(model, replicas))
    if parent is not None:
        shown["parent"] = parent
    return [shown, *({**shown, "id": alias, "root": model.name} for alias in model.aliases)]


def _shown(known: Known) -> dict[str, object]:
    """`max_model_len` is vLLM's name for a slot's context; `capabilities` are not known before a replica is up."""
    about = {"id": known.model.name, "object": "model", "created": _STARTED_S, "owned_by": "headrace"}
    can = [name for name in ("tools", "reasoning", "fim", "embeddings") if known.about.get(name, "0") != "0"]
    return {**about, "max_model_len": known.context_tokens, "capabilities": can}
