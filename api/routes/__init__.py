"""The addresses of a pod: a module for each family, `ROUTERS` lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from headrace.api.pod import Pod
from headrace.api.routes import (
    anthropic,
    llamacpp,
    ollama,
    ollama_models,
    openai,
    operations,
    ops,
    pages,
    plain,
    responses,
    streams,
    tgi,
    usage,
)

ROUTERS: tuple[Callable[[Pod], APIRouter], ...] = (
    openai.router,
    responses.router,
    anthropic.router,
    ollama.router,
    ollama_models.router,
    llamacpp.router,
    tgi.router,
    plain.router,
    streams.router,
    usage.router,
    operations.router,
    ops.router,
    pages.router,
)
