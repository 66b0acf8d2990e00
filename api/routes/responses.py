"""OpenAI's Responses: made, and found again by their ids."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import requests, responses, submit
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.wire.format import Parsed
from headrace.api.wire.responses_input import items_of
from headrace.broker.errors import BadRequest

_ITEMS_MAX = 100


def router(pod: Pod) -> APIRouter:
    """See the module."""
    routes = APIRouter(prefix="/v1/responses", dependencies=[GUARD])

    @routes.post("", response_class=Response)
    async def create(request: Request) -> Response:
        async def complete(parsed: Parsed) -> Parsed:
            return await responses.go_on(pod, request, parsed)

        return await submit.generate(pod, request, responses.FORMAT, complete=complete)

    @routes.get("/{response}", response_class=Response)
    async def retrieve(request: Request, response: str) -> Response:
        status = await responses.find(pod, request, response)
        job_id = responses.job_id_of(pod, response)
        after = request.query_params.get("starting_after")
        if not _flag(request, "stream"):
            if after is not None:
                raise BadRequest("starting_after is only allowed when stream is true.", param="starting_after")
            return await submit.as_it_is(pod, job_id, status.view, responses.FORMAT)
        skip = None if after is None else requests.Skip(_number("starting_after", after, 2**31 - 1) + 1)
        return await submit.resume(pod, request, job_id, responses.FORMAT, skip)

    @routes.post("/{response}/cancel", response_class=Response)
    async def cancel(request: Request, response: str) -> Response:
        status = await responses.find(pod, request, response)
        job_id = responses.job_id_of(pod, response)
        await responses.cancel(pod, job_id)
        return await submit.as_it_is(pod, job_id, status.view, responses.FORMAT)

    @routes.delete("/{response}", response_class=Response)
    async def delete(request: Request, response: str) -> Response:
        await responses.find(pod, request, response)
        await pod.broker.forget(responses.job_id_of(pod, response))
        return as_json({"id": response, "object": "response", "deleted": True})

    @routes.get("/{response}/input_items", response_class=Response)
    async def input_items(request: Request, response: str) -> Response:
        status = await responses.find(pod, request, response)
        job_id = responses.job_id_of(pod, response)
        items = items_of(await responses.messages_before(pod, job_id, status), job_id)
        return as_json(_page(request, items))

    return routes


def _page(request: Request, items: list[dict[str, Any]]) -> dict[str, Any]:
    """A part of the items: `order` (newest first unless `asc`), `after` (an item's id) and `limit`."""
    query = request.query_params
    if query.get("order", "desc") not in ("asc", "desc"):
        raise BadRequest("order must be asc or desc.", param="order")
    if query.get("order") != "asc":
        items = items[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest("after names no item of this response.", param="after")
        items = items[places[0] + 1 :]
    limit = max(1, _number("limit", query.get("limit", "20"), _ITEMS_MAX))
    page = items[:limit]
    ids = [item["id"] for item in page] or [None]
    return {
        "object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": len(items) > limit,
    }  # fmt: skip


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise BadRequest(f"{name} must be true or false.", param=name)
    return text == "true"


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= most):
        raise BadRequest(f"{name} must be a whole number up to {most}.", param=name)
    return int(text)
