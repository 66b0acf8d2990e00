"""Which of a pod's addresses need what: everything that is not listed here needs a key that may use models."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from starlette.requests import HTTPConnection

from headrace.broker.api_keys import KeySettings, Scope
from headrace.broker.errors import Forbidden

Access = Literal["open"] | Scope

_EXACT: Mapping[str, Access] = {
    "/healthz": "open",
    "/readyz": "open",
    "/health": "open",
    "/openapi.json": "open",
    "/ops": "open",
    "/metrics": "metrics",
}
_BELOW: Mapping[str, Access] = {"/assets/": "open", "/ops/": "admin", "/metrics/": "metrics"}
"""Of all addresses that begin so."""

_OWN = ("/v1/streams", "/v1/usage")
"""What is about the caller's own jobs is not narrowed by a key's `routes`."""


def access_of(path: str) -> Access:
    """What a route needs, by its path as it is declared."""
    if path in _EXACT:
        return _EXACT[path]
    return next((access for prefix, access in _BELOW.items() if path.startswith(prefix)), "use")


def is_page(request: HTTPConnection, path: str) -> bool:
    """Does a browser open the front page? That is open to all; other clients are answered there as at any address."""
    is_read = path == "/" and request.scope.get("method") == "GET"
    return is_read and "text/html" in request.headers.get("accept", "")


def check(key: KeySettings, access: Access, path: str) -> None:
    """Raise Forbidden if a key may not do this."""
    if access not in key.scopes:
        raise Forbidden(f"this key has not the scope {access!r}")
    if access == "use" and not path.startswith(_OWN) and not key.may_call(path):
        raise Forbidden("this key may not use this address")


@lru_cache(16)
def is_loopback(host: str) -> bool:
    """Can only this machine reach what is bound to this host?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
