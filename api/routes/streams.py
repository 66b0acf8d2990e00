"""A job by its id, in whatever format it began."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.reply import Reply
from headrace.api.routes.answers import as_json
from headrace.api.wire import BY_NAME
from headrace.broker.errors import BadRequest


def router(pod: Pod) -> APIRouter:
    """A job by its id: read it again, cancel it, ask how it is."""
    routes = APIRouter(prefix="/v1/streams", dependencies=[GUARD])

    @routes.get("/{job}", response_class=Response)
    async def resume(request: Request, job: str) -> Reply:
        name = request.query_params.get("format")
        if name is not None and name not in BY_NAME:
            raise BadRequest(f"there is no format {name[:64]!r}; there are: {', '.join(BY_NAME)}", param="format")
        return await submit.resume(pod, request, job, BY_NAME[name] if name else None)

    @routes.delete("/{job}")
    async def cancel(request: Request, job: str) -> Response:
        await submit.find(pod, request, job)
        was = await pod.cancel(job, "delete")
        said = {"id": job, "object": "stream", "was": was, "cancelled": was in ("waiting", "running")}
        return as_json(said, headers={"x-request-id": job})

    @routes.get("/{job}/status")
    async def status(request: Request, job: str) -> Response:
        found = await submit.find(pod, request, job)
        return as_json(
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

    return routes
