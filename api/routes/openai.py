"""OpenAI's addresses."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import submit
from headrace.api.pod import Pod
from headrace.api.relay import Reply
from headrace.api.routes.answers import as_json
from headrace.api.wire import BY_NAME

_STARTED_S = int(time.time())


def router(pod: Pod) -> APIRouter:
    """What OpenAI's clients speak."""
    routes = APIRouter(prefix="/v1")

    @routes.post("/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Reply:
        return await submit.generate(pod, request, BY_NAME["openai.chat"])

    @routes.post("/completions", response_class=Response)
    async def completions(request: Request) -> Reply:
        return await submit.generate(pod, request, BY_NAME["openai.completions"])

    @routes.get("/models")
    async def models(request: Request) -> Response:
        submit.caller_of(pod, request)
        listed = [
            {"id": model.name, "object": "model", "created": _STARTED_S, "owned_by": "headrace"}
            for model in pod.settings.models
        ]
        return as_json({"object": "list", "data": listed})

    return routes
