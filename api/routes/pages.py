"""The playground, the operations page, and what they are made of."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.api.access import is_page
from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.routes.ollama_models import RUNNING
from headrace.api.site import Site


def router(pod: Pod) -> APIRouter:
    """Files, which anybody may have; whatever they then show is asked for with a key."""
    routes = APIRouter(dependencies=[GUARD])
    site = Site(pod.settings.api.origins)

    @routes.get("/")
    async def playground(request: Request) -> Response:
        """The playground for browsers; other clients hear what Ollama's expect to."""
        if is_page(request, "/"):
            return site.answer(request, "playground.html")
        return PlainTextResponse(RUNNING, headers={"vary": "Accept"})

    @routes.get("/ops", include_in_schema=False)
    async def operations(request: Request) -> Response:
        return site.answer(request, "ops.html")

    @routes.get("/assets/{name}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        return site.answer(request, name)

    @routes.get("/v1/pods")
    async def pods(request: Request) -> Response:
        """The pods that a page from here may go on at: this one, and those whose origin `api.origins` lists."""
        listed = sorted(about.get("url", "") for about in (await pod.broker.listing("pods")).values())
        others = [url for url in listed if url != pod.url and url in pod.settings.api.origins]
        known = [pod.url, *dict.fromkeys(others)]
        return as_json({"object": "list", "data": [{"url": url, "is_this": url == pod.url} for url in known]})

    return routes
