"""`/v1/usage`: what the caller's owner has used, and how much its key may."""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api import auth, catalog
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.routes.bare import BareRoute
from headrace.broker.errors import BadRequest
from headrace.broker.ledger import DAY_MS

_MOST_DAYS = 35


def router(pod: Pod) -> APIRouter:
    """For owners; `headrace usage` shows those of all."""
    routes = APIRouter(prefix="/v1", route_class=BareRoute, dependencies=[auth.GUARD])

    @routes.get("/usage")
    async def usage(request: Request) -> Response:
        """`?days=7`: by day in UTC, today first, and by model; in requests that have ended."""
        key, models = auth.caller_of(request), [model.name for model in catalog.models_of(pod, request)]
        today = time.time_ns() // 1_000_000 // DAY_MS
        found = [
            used
            for day in range(today, today - _days(request), -1)
            for used in await pod.broker.ledger.usage_of(key.owner, models, day)
        ]
        rows = [
            {
                "date": datetime.fromtimestamp(used.day * DAY_MS / 1000, UTC).date().isoformat(),
                "model": used.model,
                "requests": used.requests,
                "prompt_tokens": used.prompt_tokens,
                "completion_tokens": used.completion_tokens,
            }
            for used in found
        ]
        limits, owner_limits = msgspec.to_builtins(key.limits), msgspec.to_builtins(key.owner_limits)
        return as_json(
            {"object": "usage", "owner": key.owner, "data": rows, "limits": limits, "owner_limits": owner_limits}
        )

    return routes


def _days(request: Request) -> int:
    text = request.query_params.get("days", "7")
    if not (text.isascii() and text.isdecimal() and len(text) <= 2 and 1 <= int(text) <= _MOST_DAYS):
        raise BadRequest(f"days must be a whole number from 1 to {_MOST_DAYS}.", param="days")
    return int(text)
