"""The addresses of a pod: a module for each family, `ROUTERS` lists them."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter

from headrace.api.pod import Pod
from headrace.api.routes import anthropic, ollama, ollama_models, openai, operations, streams

ROUTERS: tuple[Callable[[Pod], APIRouter], ...] = (
    openai.router,
    anthropic.router,
    ollama.router,
    ollama_models.router,
    streams.router,
    operations.router,
)
