"""`/chat` and `/ws/chat`: for a page's script, without any library."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from headrace.api import requests, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.bare import BareRoute
from headrace.api.websocket import Conversation
from headrace.api.wire import BY_NAME, sse
from headrace.broker.errors import BadRequest

_NUMBERS: dict[str, type[int] | type[float]] = {
    "max_tokens": int,
    "top_k": int,
    "seed": int,
    "temperature": float,
    "top_p": float,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
}
_TEXTS = ("prompt", "model")
_NOT_FIELDS = ("after",)


def router(pod: Pod) -> APIRouter:
    """The plain format."""
    routes = APIRouter(route_class=BareRoute, dependencies=[GUARD])

    @routes.get("/chat", response_class=Response)
    async def ask(request: Request) -> Response:
        """For `EventSource`, which comes back by itself, with `Last-Event-ID`: nothing is generated twice.

        After the last event it comes back too; 204 is what tells it to stay away.
        """
        cut = requests.cut(request, pod.broker.shards)
        if cut is not None and await submit.has_all(pod, request, cut):
            return Response(status_code=204, headers={"x-request-id": cut.job_id})
        return await submit.generate(pod, request, BY_NAME["plain"], _body(request))

    @routes.post("/chat", response_class=Response)
    async def chat(request: Request) -> Response:
        return await submit.generate(pod, request, BY_NAME["plain"])

    @routes.websocket("/ws/chat")
    async def converse(socket: WebSocket) -> None:
        await Conversation(pod, socket).run()

    return routes


def _body(request: Request) -> bytes:
    """The query as the body that `POST /chat` takes; each field once, `stop` as often as there are stop strings."""
    fields: dict[str, Any] = {}
    for name in request.query_params:
        given = request.query_params.getlist(name)
        if name == "stop":
            fields[name] = given
        elif name in _NOT_FIELDS:
            continue
        elif len(given) > 1 or name not in (*_TEXTS, *_NUMBERS):
            raise BadRequest(f"{name[:64]} cannot stand in the query, or not twice.", param=name[:64])
        else:
            fields[name] = _value(name, given[0])
    return sse.encode(fields)


def _value(name: str, text: str) -> str | int | float:
    try:
        return _NUMBERS[name](text) if name in _NUMBERS else text
    except ValueError as error:
        raise BadRequest(f"{name} must be a number.", param=name) from error
