"""OpenAI's addresses that are not about stored responses."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import submit
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.wire import BY_NAME
from headrace.broker.settings import Model

_STARTED_S = int(time.time())


def router(pod: Pod) -> APIRouter:
    """What OpenAI's clients speak."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["openai.chat"])

    @routes.post("/completions", response_class=Response)
    async def completions(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["openai.completions"])

    @routes.post("/embeddings", response_class=Response)
    async def embeddings(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["openai.embeddings"])

    @routes.get("/models")
    async def models(request: Request) -> Response:
        submit.caller_of(pod, request)
        return as_json({"object": "list", "data": [_shown(model) for model in pod.settings.models]})

    @routes.get("/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        submit.caller_of(pod, request)
        return as_json(_shown(submit.model_of(pod, name)))

    return routes


def _shown(model: Model) -> dict[str, object]:
    """`max_model_len` is vLLM's name for what a slot's context holds."""
    about = {"id": model.name, "object": "model", "created": _STARTED_S, "owned_by": "headrace"}
    return {**about, "max_model_len": model.context_tokens}
