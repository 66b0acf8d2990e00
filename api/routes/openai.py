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
from headrace.api.wire.ollama_models import Known, look_up
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
            known = await _known(pod, catalog.model_of(pod, request, parsed.job.model))
            check_dimensions(parsed, int(known.about.get("embeddings") or 0))
            return parsed

        return await submit.generate(pod, request, BY_NAME["openai.embeddings"], complete=complete)

    @routes.get("/models")
    async def models(request: Request) -> Response:
        shown = [_shown(await _known(pod, model)) for model in catalog.models_of(pod, request)]
        return as_json({"object": "list", "data": shown})

    @routes.get("/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return as_json(_shown(await _known(pod, catalog.model_of(pod, request, name))))

    return routes


async def _known(pod: Pod, model: Model) -> Known:
    """A model with what its replicas say; while the broker is away, with what is configured."""
    try:
        return look_up(model, await pod.broker.listing("replicas"))
    except BrokerDown:
        return look_up(model, {})


def _shown(known: Known) -> dict[str, object]:
    """`max_model_len` is vLLM's name for a slot's context; `capabilities` are not known before a replica is up."""
    about = {"id": known.model.name, "object": "model", "created": _STARTED_S, "owned_by": "headrace"}
    can = [name for name in ("tools", "reasoning", "fim", "embeddings") if known.about.get(name, "0") != "0"]
    return {**about, "max_model_len": known.context_tokens, "capabilities": can}
