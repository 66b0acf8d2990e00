"""TGI's addresses. `/health` is shared with llama.cpp's."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import catalog, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.routes.bare import BareRoute
from headrace.api.wire.tgi import TGI

_GENERATE, _STREAM, _COMPAT = TGI("whole"), TGI("stream"), TGI("body")


def router(pod: Pod) -> APIRouter:
    """What TGI's clients speak; `huggingface_hub` posts to the root."""
    routes = APIRouter(route_class=BareRoute, dependencies=[GUARD])

    @routes.post("/generate", response_class=Response)
    async def generate(request: Request) -> Response:
        return await submit.generate(pod, request, _GENERATE)

    @routes.post("/generate_stream", response_class=Response)
    async def generate_stream(request: Request) -> Response:
        return await submit.generate(pod, request, _STREAM)

    @routes.post("/", response_class=Response)
    async def compat(request: Request) -> Response:
        return await submit.generate(pod, request, _COMPAT)

    @routes.get("/info")
    async def info(request: Request) -> Response:
        model, limits = catalog.chosen(pod, request, ""), pod.settings.api
        return as_json(
            {
                "model_id": model.name,
                "model_sha": None,
                "model_pipeline_tag": "text-generation",
                "max_concurrent_requests": pod.settings.queue.max_waiting_jobs,
                "max_best_of": 1,
                "max_stop_sequences": limits.max_stops,
                "max_input_tokens": model.context_tokens - 1,
                "max_total_tokens": model.context_tokens,
                "validation_workers": 1,
                "max_client_batch_size": 1,
                "router": "headrace",
                "version": version("headrace"),
                "sha": None,
                "docker_label": None,
            }
        )

    return routes
