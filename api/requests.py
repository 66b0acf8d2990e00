"""Reading a request: its body within bounds and time, and the headers that decide a job's life."""

from __future__ import annotations

import asyncio
import math
import re
from typing import cast, get_args

from msgspec import Struct
from starlette.requests import ClientDisconnect, HTTPConnection, Request

from headrace.broker import keys
from headrace.broker.errors import BadPosition, BadRequest, BodyEncoded, BodyTimeout, BodyTooLarge
from headrace.broker.messages import Band
from headrace.broker.settings import ApiSettings

_POSITION = re.compile(r"([0-9a-f]{32})\.([0-9]{1,10}-[0-9]{1,10})(?:\.([1-9][0-9]{0,5}))?")
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,128}")
_IDEMPOTENCY_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_GRACE_MAX_S = 86_400
_COALESCE_MAX_MS = 10_000


class Cut(Struct, frozen=True):
    """Where a client stopped reading: after this entry, or after frame `k` of it."""

    job_id: str
    entry: tuple[int, int]
    frame: int | None


class Skip(Struct, frozen=True):
    """Where a client stopped reading, in a format whose frames are numbered: it has this many."""

    frames: int


async def read_body(request: Request, limits: ApiSettings) -> bytes:
    """The whole body; raises BodyTooLarge at the first byte too many, BodyTimeout if it does not come in time.

    A compressed one is refused with BodyEncoded: a few bytes of it may stand for gigabytes.
    """
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise BodyEncoded
    too_large = BodyTooLarge(f"the body is larger than {limits.max_body_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > 18 or int(declared) > limits.max_body_bytes):
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {limits.body_timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise BadRequest("the client left before its request was complete") from error
    return bytes(body)


def grace_ms(request: HTTPConnection, *, default_ms: int) -> int:
    """`X-On-Disconnect: cancel | continue | <seconds>`: 0, -1, or milliseconds."""
    text = request.headers.get("x-on-disconnect")
    match text:
        case None:
            return default_ms
        case "cancel":
            return 0
        case "continue":
            return -1
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _GRACE_MAX_S:
        raise BadRequest(
            f"X-On-Disconnect must be cancel, continue, or 0 to {_GRACE_MAX_S} seconds", param="X-On-Disconnect"
        )
    return round(seconds * 1000)


def idempotency_key(request: HTTPConnection) -> str | None:
    """`Idempotency-Key`: 1 to 255 visible ASCII characters, once; raises BadRequest for anything else."""
    given = request.headers.getlist("idempotency-key")
    if not given:
        return None
    if len(given) > 1 or _IDEMPOTENCY_KEY.fullmatch(given[0]) is None:
        raise BadRequest("Idempotency-Key must be 1 to 255 visible ASCII characters", param="Idempotency-Key")
    return given[0]


def queue_timeout_ms(request: HTTPConnection, longest_s: float) -> int | None:
    """`X-Queue-Timeout: <seconds>`: how long the request may wait before it ends as `timeout`."""
    text = request.headers.get("x-queue-timeout")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= longest_s:
        raise BadRequest(
            f"X-Queue-Timeout must be more than 0 and at most {longest_s:g} seconds", param="X-Queue-Timeout"
        )
    return math.ceil(seconds * 1000)


def coalesce_s(request: HTTPConnection) -> float:
    """`X-Coalesce-Ms: <milliseconds>`: what comes within so long goes out together; 0 if it is not there."""
    text = request.headers.get("x-coalesce-ms", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) <= _COALESCE_MAX_MS):
        raise BadRequest(f"X-Coalesce-Ms must be a whole number up to {_COALESCE_MAX_MS}", param="X-Coalesce-Ms")
    return int(text) / 1000


def band(request: HTTPConnection) -> Band | None:
    """`X-Priority: interactive | default | batch`."""
    text = request.headers.get("x-priority")
    if text is None:
        return None
    if text not in get_args(Band):
        raise BadRequest("X-Priority must be interactive, default or batch", param="X-Priority")
    return cast(Band, text)


def session_id(request: HTTPConnection) -> str | None:
    """`X-Session-Id`: which conversation the request belongs to; dropped if it is not 1 to 128 safe characters."""
    text = request.headers.get("x-session-id", "")
    return text if _SAFE_ID.fullmatch(text) else None


def user_request_id(request: HTTPConnection) -> str | None:
    """The client's own `X-Request-Id`, for logs: dropped if it is not 1 to 128 safe characters."""
    text = request.headers.get("x-request-id", "")
    return text if _SAFE_ID.fullmatch(text) else None


def cut(request: HTTPConnection, shards: int) -> Cut | None:
    """The position in `Last-Event-ID` or `?after=`; None if there is none; raises BadPosition if it is not one."""
    text = request.headers.get("last-event-id") or request.query_params.get("after")
    return position(text, shards) if text else None


def position(text: str, shards: int) -> Cut:
    """Read `<job>.<attempt>-<n>`, with `.<k>` for a frame inside of an entry; raises BadPosition."""
    found = _POSITION.fullmatch(text)
    if found is None or not keys.is_job_id(found[1], shards):
        raise BadPosition(
            "the position must be <job>.<attempt>-<n>, as in the stream's id lines", param="Last-Event-ID"
        )
    attempt, n = found[2].split("-")
    return Cut(found[1], (int(attempt), int(n)), int(found[3]) if found[3] else None)


def route_of(request: HTTPConnection) -> str:
    """The address as it was declared: what a client wrote into it is not in it."""
    path: str = getattr(request.scope.get("route"), "path", "other")
    return path
