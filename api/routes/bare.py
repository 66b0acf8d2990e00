"""A route whose endpoint takes the request and nothing else: FastAPI finds it, and adds nothing on the way.

The general handler solves dependencies and opens exit stacks for each request, which costs more than reading it does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth import guard


class BareRoute(APIRoute):
    """For `APIRouter(route_class=...)`; an endpoint with other parameters is handled as usual."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        needs, endpoint = self.dependant, self.endpoint
        others = (needs.path_params, needs.query_params, needs.header_params, needs.cookie_params, needs.body_params)
        is_guarded = [each.call for each in needs.dependencies] == [guard]
        if any(others) or not is_guarded or needs.request_param_name is None:
            return super().get_route_handler()
        name = needs.request_param_name

        async def handle(request: Request) -> Response:
            await guard(request)
            response: Response = await endpoint(**{name: request})
            return response

        return handle
