"""Runs a pod's long responses outside of the application that made them.

A stream would keep every layer's frame, the request and its body for as long as it is open. So a `relay.Reply` that was
reached through here leaves itself in the scope, all layers return, and then it is run, with the `send` that they made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

_KEY = "headrace.carrier"
_LAYERS = ("fastapi_", "starlette.", "app", "router", "route", "endpoint")


class Carrier:
    """The application that the server runs."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.state = app.state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        left: list[Callable[[], Awaitable[None]]] = []
        scope[_KEY] = left
        await self.app(scope, receive, send)
        if left:
            for key in [key for key in scope if key.startswith(_LAYERS)]:
                del scope[key]  # exit stacks and the like, which are closed and would be kept
            await left.pop()()


def leave(scope: Any, run: Callable[[], Awaitable[None]]) -> bool:
    """Have this run once the application has returned; False if nobody would."""
    left: list[Callable[[], Awaitable[None]]] | None = scope.get(_KEY)
    if left is None:
        return False
    left.append(run)
    return True
