"""The addresses of a pod: a module for each family, `ROUTERS` lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from headrace.api.pod import Pod
from headrace.api.routes import openai, operations, responses, streams

ROUTERS: tuple[Callable[[Pod], APIRouter], ...] = (openai.router, responses.router, streams.router, operations.router)
