"""Who is asking. `GUARD` stands before every route: it finds the key a request carries, and what that may.

Nothing is answered without it: `create_app` refuses to make an application with a route that it does not stand before.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import Depends
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute, APIWebSocketRoute
from starlette.requests import HTTPConnection
from starlette.routing import BaseRoute

from headrace.api import hosts
from headrace.api.access import Access, access_of, check, is_page
from headrace.broker.api_keys import KeySettings
from headrace.broker.errors import Forbidden, HeadersTooLarge, Unauthorized
from headrace.broker.messages import Band

if TYPE_CHECKING:
    from headrace.api.pod import Pod

BEARER = "bearer."
"""Begins the WebSocket subprotocol that carries a key: a page's script can set no header."""


_READING = ("GET", "HEAD")


async def guard(request: HTTPConnection) -> None:
    """Find out who asks, and whether they may ask this; raises HeadersTooLarge, Unauthorized, Forbidden."""
    pod: Pod = request.app.state.pod
    limit = pod.settings.api.max_header_bytes
    if sum(len(name) + len(value) for name, value in request.scope["headers"]) > limit:
        raise HeadersTooLarge(f"the headers are larger than {limit} bytes")
    hosts.check(request)
    path = path_of(request)
    access: Access = "open" if is_page(request, path) else access_of(path)
    if access == "metrics" and pod.settings.api.open_metrics:
        access = "open"
    if access != "open":
        request.state.caller = await _admitted(pod, request, access, path)


async def _admitted(pod: Pod, request: HTTPConnection, access: Access, path: str) -> KeySettings:
    key: KeySettings | None = None
    try:
        key = await pod.keyring.find(token_of(request, access))
        check(key, access, path)
    except (Unauthorized, Forbidden) as error:
        await pod.audit.refused(request, error, key)
        raise
    if not key.sha256:
        hosts.check_page(request, pod.settings)
    if access == "admin" and request.scope.get("method") not in _READING:
        await pod.audit.acted(request, key)
    return key


GUARD = Depends(guard)


def caller_of(request: HTTPConnection) -> KeySettings:
    """Who asks, as `guard` has found out."""
    key: KeySettings = request.state.caller
    return key


def path_of(request: HTTPConnection) -> str:
    """The path of the route that a request has met, as it is declared; that of the request if it has met none."""
    route = request.scope.get("route")
    return str(getattr(route, "path", request.scope["path"]))


def token_of(request: HTTPConnection, access: Access) -> str:
    """The key that a request carries, empty if there is none or more than one.

    As a bearer token, as Anthropic's `x-api-key`, or as a WebSocket's subprotocol. As a password only for Prometheus:
    browsers send those by themselves, also on behalf of other pages.
    """
    if given := request.headers.getlist("authorization"):
        scheme, _, token = given[0].partition(" ")
        if len(given) == 1 and scheme.lower() == "bearer":
            return token
        is_password = len(given) == 1 and scheme.lower() == "basic" and access == "metrics"
        return _password(token) if is_password else ""
    if given := request.headers.getlist("x-api-key"):
        return given[0] if len(given) == 1 else ""
    offered = [each for each in request.scope.get("subprotocols", ()) if each.startswith(BEARER)]
    return offered[0].removeprefix(BEARER) if len(offered) == 1 else ""


def _password(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def unguarded(routes: list[BaseRoute]) -> list[str]:
    """The paths of routes that the guard does not stand before."""
    return [
        str(getattr(route, "path", route))
        for route in routes
        if not isinstance(route, APIRoute | APIWebSocketRoute) or guard not in _calls(route.dependant)
    ]


def _calls(needs: Dependant) -> Iterator[object]:
    return (each.call for each in needs.dependencies)


def bounded(wanted: Band | None, ceiling: Band) -> Band:
    """The band a request gets: what it asked for, but none better than its key may have."""
    order: list[Band] = ["interactive", "default", "batch"]
    return max(wanted or "default", ceiling, key=order.index)
