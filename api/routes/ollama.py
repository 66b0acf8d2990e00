"""Ollama's addresses that run a model."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import catalog, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.bare import BareRoute
from headrace.api.wire import BY_NAME
from headrace.api.wire.ollama import Load


def router(pod: Pod) -> APIRouter:
    """What Ollama's clients speak."""
    routes = APIRouter(prefix="/api", route_class=BareRoute, dependencies=[GUARD])

    async def run(request: Request, form: str) -> Response:
        try:
            return await submit.generate(pod, request, BY_NAME[form])
        except Load as load:
            catalog.model_of(pod, request, load.model)
            return Response(load.body, media_type="application/json")

    @routes.post("/chat", response_class=Response)
    async def chat(request: Request) -> Response:
        return await run(request, "ollama.chat")

    @routes.post("/generate", response_class=Response)
    async def generate(request: Request) -> Response:
        return await run(request, "ollama.generate")

    @routes.post("/embed", response_class=Response)
    async def embed(request: Request) -> Response:
        return await run(request, "ollama.embed")

    @routes.post("/embeddings", response_class=Response)
    async def embeddings(request: Request) -> Response:
        return await run(request, "ollama.embeddings")

    return routes
