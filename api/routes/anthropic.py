"""Anthropic's addresses."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.bare import BareRoute
from headrace.api.wire import BY_NAME


def router(pod: Pod) -> APIRouter:
    """What Anthropic's clients speak. The `anthropic-version` and `anthropic-beta` headers are not looked at."""
    routes = APIRouter(prefix="/v1/messages", route_class=BareRoute, dependencies=[GUARD])

    @routes.post("", response_class=Response)
    async def messages(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["anthropic.messages"])

    @routes.post("/count_tokens", response_class=Response)
    async def count_tokens(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["anthropic.count_tokens"])

    return routes
