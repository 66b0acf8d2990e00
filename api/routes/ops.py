"""What the operations page and `headrace top` are fed with: it shows the whole deployment, so it is for admins."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.watch import Viewer, Watch


def router(pod: Pod) -> APIRouter:
    """The deployment now, once or as it changes."""
    routes = APIRouter(prefix="/ops", dependencies=[GUARD])
    watch = Watch(pod)

    @routes.get("/snapshot")
    async def snapshot(request: Request) -> Response:
        return Response(await watch.snapshot(), media_type="application/json")

    @routes.get("/events", include_in_schema=False, response_class=Response)
    async def events(request: Request) -> Viewer:
        return Viewer(watch)

    return routes
