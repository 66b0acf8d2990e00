"""Who is asking: an API key's owner, or `anonymous` where no keys are configured."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import HTTPConnection

from headrace.broker.errors import Unauthorized
from headrace.broker.messages import Band
from headrace.broker.settings import KeySettings

ANONYMOUS = KeySettings(owner="anonymous", sha256="")


def caller(request: HTTPConnection, keys: list[KeySettings]) -> KeySettings:
    """The key that the request carries; raises Unauthorized, which shows nothing of what was sent."""
    if not keys:
        return ANONYMOUS
    token = _token(request)
    digest = hashlib.sha256(token.encode()).hexdigest() if token else ""
    found = [key for key in keys if hmac.compare_digest(key.sha256, digest)]
    if not found:
        raise Unauthorized("the API key is missing or wrong: send Authorization: Bearer <key>, or x-api-key: <key>")
    return found[0]


def _token(request: HTTPConnection) -> str:
    """A bearer token, or without such a header Anthropic's `x-api-key`; empty unless it is there exactly once."""
    if given := request.headers.getlist("authorization"):
        scheme, _, token = given[0].partition(" ")
        return token if len(given) == 1 and scheme.lower() == "bearer" else ""
    given = request.headers.getlist("x-api-key")
    return given[0] if len(given) == 1 else ""


def bounded(wanted: Band | None, ceiling: Band) -> Band:
    """The band a request gets: what it asked for, but none better than its key may have."""
    order: list[Band] = ["interactive", "default", "batch"]
    return max(wanted or "default", ceiling, key=order.index)
