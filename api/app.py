"""The pod as an ASGI application.

No middleware wraps `receive`, or puts a queue before `send`: a wrapper in between hides that a client has left.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import auth, origins, ratelimit, request_log, requests, wire
from headrace.api.access import access_of
from headrace.api.pod import Pod
from headrace.api.reply import retry_after
from headrace.api.routes import ROUTERS
from headrace.api.wire.format import id_headers, status_of
from headrace.broker import metrics
from headrace.broker.errors import (
    BadRequest,
    BodyEncoded,
    BodyTimeout,
    BodyTooLarge,
    HeadersTooLarge,
    HeadraceError,
    LimitReached,
    MethodNotAllowed,
    NotFound,
)
from headrace.broker.models_file import ModelsFile
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings

log = logging.getLogger(__name__)


def create_app(settings: Settings, broker: Broker, url: str = "", models: ModelsFile | None = None) -> FastAPI:
    """One pod. It owns the broker it is given: opened at start-up, closed at shutdown."""
    pod = Pod(settings, broker, url, models)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await pod.start()
        yield
        await pod.close()

    app = FastAPI(title="headrace", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # it would send clients to the host that their own request has named
    app.state.pod = pod
    routers = [router(pod) for router in ROUTERS]
    for router in routers:
        app.include_router(router)
    app.state.routes = [route for router in routers for route in router.routes]
    if bare := auth.unguarded(app.state.routes):
        raise RuntimeError(f"routes without `dependencies=[auth.GUARD]`: {', '.join(bare)}")
    origins.allow(app, settings.api.origins)
    app.add_exception_handler(HeadraceError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HeadraceError)
    if access_of(auth.path_of(request)) != "open":  # a probe is no request, though it is told no
        metrics.REJECTIONS.labels(error.code).inc()
    form = wire.of_path(request.url.path)
    status, headers = status_of(form, error), dict(retry_after(error))
    if job_id := getattr(request.state, "job_id", None):
        error.job_id = job_id
        headers |= id_headers(form, job_id)
    if isinstance(error, LimitReached):
        headers |= ratelimit.headers(form.name, error.standing)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooLarge | BodyTimeout | BodyEncoded | HeadersTooLarge):
        headers["connection"] = "close"
    request_log.refused(request, error, status)
    pod: Pod = request.app.state.pod
    if pod.tracing is not None and (trace := pod.tracing.begin(pod.tracing.parent(request))):
        trace.refuse(request, requests.route_of(request), error, status)
    return Response(form.error_body(error), status, headers=headers, media_type="application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    try:
        await auth.guard(request)  # who may ask nothing is told nothing, not even what there is
    except HeadraceError as refused:
        return await _on_error(request, refused)
    kinds = {404: NotFound("there is no such address here"), 405: MethodNotAllowed()}
    response = await _on_error(request, kinds.get(error.status_code) or BadRequest(str(error.detail)))
    response.headers.update(error.headers or {})  # a 405 must say what is allowed
    return response


async def _on_bug(request: Request, error: Exception) -> Response:
    request_id = getattr(request.state, "job_id", None) or requests.user_request_id(request) or "-"
    log.error("a request failed", exc_info=error, extra={"event": "request_failed", "request_id": request_id})
    return await _on_error(request, HeadraceError())
