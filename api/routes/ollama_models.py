"""Ollama's addresses that are about models: what there is, and that nobody changes it through here."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.api import catalog, requests
from headrace.api.auth import GUARD
from headrace.api.body import decode
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.wire.ollama_models import ShowRequest, listed, look_up, running, shown
from headrace.broker.errors import BadRequest

API_LEVEL = "0.12.6"
"""The release of Ollama whose API this is; clients ask whether it is new enough for them."""

_CHANGES = ("/pull", "/push", "/create", "/copy")


RUNNING = "Ollama is running"

_show = msgspec.json.Decoder(ShowRequest)


def router(pod: Pod) -> APIRouter:
    """What there is."""
    routes = APIRouter(dependencies=[GUARD])

    @routes.head("/")
    async def root(request: Request) -> Response:
        """For the official client; `GET` is in `pages.py`, since browsers ask for it too."""
        return PlainTextResponse(RUNNING)

    @routes.api_route("/api/version", methods=["GET", "HEAD"])
    async def version(request: Request) -> Response:
        return as_json({"version": API_LEVEL})

    @routes.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags(request: Request) -> Response:
        replicas = await pod.broker.listing("replicas")
        return as_json({"models": [listed(look_up(model, replicas)) for model in catalog.models_of(pod, request)]})

    @routes.get("/api/ps")
    async def ps(request: Request) -> Response:
        replicas = await pod.broker.listing("replicas")
        found = [look_up(model, replicas) for model in catalog.models_of(pod, request)]
        return as_json({"models": [running(each) for each in found if each.is_ready]})

    @routes.post("/api/show")
    async def show(request: Request) -> Response:
        asked = decode(_show, await requests.read_body(request, pod.settings.api), pod.settings.api)
        if not (name := asked.model or asked.name):
            raise BadRequest("model is required.", param="model")
        model = catalog.model_of(pod, request, name)
        return as_json(shown(look_up(model, await pod.broker.listing("replicas"))))

    async def refuse(request: Request) -> Response:
        raise BadRequest("models are configured by whoever runs this server; they cannot be changed through its API")

    for path in _CHANGES:
        routes.add_api_route(f"/api{path}", refuse, methods=["POST"])
    routes.add_api_route("/api/delete", refuse, methods=["DELETE"])
    routes.add_api_route("/api/blobs/{digest}", refuse, methods=["POST", "HEAD"])
    return routes
