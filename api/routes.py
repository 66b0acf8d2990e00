"""The addresses of a pod, a router for each family."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import submit
from headrace.api.formats import BY_NAME
from headrace.api.pod import Pod
from headrace.api.relay import Reply
from headrace.broker.errors import BadRequest, BrokerDown

_STARTED_S = int(time.time())


def openai(pod: Pod) -> APIRouter:
    """What OpenAI's clients speak."""
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions", response_class=Response)
    async def chat_completions(request: Request) -> Reply:
        return await submit.generate(pod, request, BY_NAME["openai.chat"])

    @router.post("/completions", response_class=Response)
    async def completions(request: Request) -> Reply:
        return await submit.generate(pod, request, BY_NAME["openai.completions"])

    @router.get("/models")
    async def models(request: Request) -> Response:
        submit.caller_of(pod, request)
        listed = [
            {"id": model.name, "object": "model", "created": _STARTED_S, "owned_by": "headrace"}
            for model in pod.settings.models
        ]
        return _json({"object": "list", "data": listed})

    return router


def streams(pod: Pod) -> APIRouter:
    """A job by its id: read it again, cancel it, ask how it is."""
    router = APIRouter(prefix="/v1/streams")

    @router.get("/{job}", response_class=Response)
    async def resume(request: Request, job: str) -> Reply:
        name = request.query_params.get("format")
        if name is not None and name not in BY_NAME:
            raise BadRequest(f"there is no format {name[:64]!r}; there are: {', '.join(BY_NAME)}", param="format")
        return await submit.resume(pod, request, job, BY_NAME[name] if name else None)

    @router.delete("/{job}")
    async def cancel(request: Request, job: str) -> Response:
        await submit.find(pod, request, job)
        was = await pod.broker.cancel(job, "delete")
        said = {"id": job, "object": "stream", "was": was, "cancelled": was in ("waiting", "running")}
        return _json(said, headers={"x-request-id": job})

    @router.get("/{job}/status")
    async def status(request: Request, job: str) -> Response:
        found = await submit.find(pod, request, job)
        return _json(
            {
                "id": job,
                "object": "stream.status",
                "state": found.state,
                "model": found.view.model,
                "format": found.view.format,
                "last": f"{job}.{found.last}",
                "attempt": found.attempt,
                "ahead": found.ahead,
            },
            headers={"x-request-id": job},
        )

    return router


def operations(pod: Pod) -> APIRouter:
    """Probes and metrics."""
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Response:
        return _json({"status": "ok"})

    @router.get("/readyz")
    async def readyz() -> Response:
        trouble = pod.trouble
        return _json({"status": trouble.code if trouble else "ok"}, 503 if trouble else 200)

    @router.get("/metrics")
    async def metrics() -> Response:
        try:
            await pod.observe_models()
        except BrokerDown as error:
            pod.trouble = error
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return router


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
