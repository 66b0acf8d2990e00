"""Pages of other origins: which may open a WebSocket, and read answers (CORS)."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection

EXPOSED = ("X-Request-Id", "X-Headrace-Model", "X-Idempotent-Replay", "Retry-After")


def is_welcome(request: HTTPConnection, origins: list[str]) -> bool:
    """A browser says whose page opens a WebSocket, and asks nobody: so it is asked here.

    What is no browser says no origin. One that is not listed must be that of the address that was called; the scheme
    is not compared, since TLS may have ended before this pod.
    """
    given = request.headers.getlist("origin")
    if not given:
        return True
    if len(given) > 1:
        return False
    if "*" in origins or given[0] in origins:
        return True
    _, _, of_page = given[0].partition("://")
    return bool(of_page) and of_page.lower() == request.headers.get("host", "").lower()


def allow(app: FastAPI, origins: list[str]) -> None:
    """Answer the pages of these origins; nothing is added where there are none.

    Starlette's middleware adds headers to the first message of a response and leaves `receive` alone, so that a client
    that leaves is noticed as before.
    """
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
