"""What operations ask a pod."""

from __future__ import annotations

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth import GUARD
from headrace.api.openapi import document
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.targets import targets as find_targets


def router(pod: Pod) -> APIRouter:
    """Probes and metrics."""
    routes = APIRouter(dependencies=[GUARD])

    @routes.get("/healthz")
    async def healthz() -> Response:
        return as_json({"status": "ok"})

    @routes.get("/readyz")
    async def readyz() -> Response:
        trouble = pod.trouble
        return as_json({"status": trouble.code if trouble else "ok"}, 503 if trouble else 200)

    @routes.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        return Response(document(request.app), media_type="application/json")

    @routes.get("/metrics")
    async def metrics() -> Response:
        await pod.observe()
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/metrics/targets")
    async def targets() -> Response:
        return as_json(await find_targets(pod.broker))

    return routes
