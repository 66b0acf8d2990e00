"""Small answers that are no stream."""

from __future__ import annotations

import msgspec
from starlette.responses import Response


def as_json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")
