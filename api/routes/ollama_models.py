"""Ollama's addresses that are about models: what there is, and that nobody changes it through here.

What a model is comes from the settings, and from what its replicas say of it in the registry, as far as they say it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.api import requests, submit
from headrace.api.body import decode
from headrace.api.pod import Pod
from headrace.api.routes.answers import as_json
from headrace.api.wire.ollama import stamp
from headrace.broker.errors import BadRequest
from headrace.broker.settings import Model

API_LEVEL = "0.12.6"
"""The release of Ollama whose API this is; clients ask whether it is new enough for them."""

_STARTED = stamp(round(time.time() * 1000))
_FOR_EVER = timedelta(days=365 * 100)
_CHANGES = ("/pull", "/push", "/create", "/copy")

Replicas = Mapping[str, Mapping[str, str]]


class ShowRequest(Struct, frozen=True):
    """Which model; `name` is the older name of the field."""

    model: str = ""
    name: str = ""


_show = msgspec.json.Decoder(ShowRequest)


def router(pod: Pod) -> APIRouter:
    """What there is."""
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def root(request: Request) -> Response:
        submit.caller_of(pod, request)
        return PlainTextResponse("Ollama is running")

    @routes.api_route("/api/version", methods=["GET", "HEAD"])
    async def version(request: Request) -> Response:
        submit.caller_of(pod, request)
        return as_json({"version": API_LEVEL})

    @routes.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags(request: Request) -> Response:
        submit.caller_of(pod, request)
        replicas = await pod.broker.listing("replicas")
        return as_json({"models": [_listed(model, replicas) for model in pod.settings.models]})

    @routes.get("/api/ps")
    async def running(request: Request) -> Response:
        submit.caller_of(pod, request)
        replicas = await pod.broker.listing("replicas")
        loaded = [model for model in pod.settings.models if _about(model, replicas).get("state") == "ready"]
        return as_json({"models": [_running(model, replicas) for model in loaded]})

    @routes.post("/api/show")
    async def show(request: Request) -> Response:
        submit.caller_of(pod, request)
        asked = decode(_show, await requests.read_body(request, pod.settings.api), pod.settings.api)
        if not (name := asked.model or asked.name):
            raise BadRequest("model is required.", param="model")
        model = submit.model_of(pod, name)
        return as_json(_shown(model, _about(model, await pod.broker.listing("replicas"))))

    async def refuse(request: Request) -> Response:
        submit.caller_of(pod, request)
        raise BadRequest("models are configured by whoever runs this server; they cannot be changed through its API")

    for path in _CHANGES:
        routes.add_api_route(f"/api{path}", refuse, methods=["POST"])
    routes.add_api_route("/api/delete", refuse, methods=["DELETE"])
    routes.add_api_route("/api/blobs/{digest}", refuse, methods=["POST", "HEAD"])
    return routes


def _about(model: Model, replicas: Replicas) -> dict[str, Any]:
    """What the replicas of a model say of it, those that are ready first; details may stand by themselves as JSON."""
    found = [about for about in replicas.values() if about.get("model") == model.name]
    found.sort(key=lambda about: about.get("state") != "ready")
    said: dict[str, Any] = dict(found[0]) if found else {}
    try:
        details = msgspec.json.decode(said.pop("details", "{}"))
    except msgspec.DecodeError:
        details = {}
    return {**said, **details} if isinstance(details, dict) else said


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _named(model: Model, about: Mapping[str, Any]) -> dict[str, object]:
    """Nobody here knows the digest of a model's files; clients need one, and that it stays."""
    digest = hashlib.sha256(msgspec.json.encode(model)).hexdigest()
    return {
        "name": _tagged(model.name),
        "model": _tagged(model.name),
        "size": _int(about.get("size")),
        "digest": digest,
        "details": _details(about),
    }


def _listed(model: Model, replicas: Replicas) -> dict[str, object]:
    return {**_named(model, _about(model, replicas)), "modified_at": _STARTED}


def _running(model: Model, replicas: Replicas) -> dict[str, object]:
    about = _about(model, replicas)
    return {
        **_named(model, about),
        "expires_at": (datetime.now(UTC) + _FOR_EVER).isoformat(timespec="seconds"),
        "size_vram": _int(about.get("size")) if model.gpus else 0,
        "context_length": _context(model, about),
    }


def _shown(model: Model, about: Mapping[str, Any]) -> dict[str, object]:
    family, context = str(about.get("family", "")), _context(model, about)
    architecture = family or "unknown"
    return {
        "license": "",
        "modelfile": f"FROM {model.name}\n",
        "parameters": f"num_ctx                        {context}",
        "template": str(about.get("template", "")),
        "details": _details(about),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": model.name,
            f"{architecture}.context_length": context,
        },
        "capabilities": _capabilities(about),
        "modified_at": _STARTED,
    }


def _details(about: Mapping[str, Any]) -> dict[str, object]:
    family = str(about.get("family", ""))
    return {
        "parent_model": "",
        "format": str(about.get("format", "gguf" if family else "")),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": str(about.get("parameter_size", "")),
        "quantization_level": str(about.get("quantization", "")),
    }


def _capabilities(about: Mapping[str, Any]) -> list[str]:
    """In Ollama's words; a replica that says nothing can at least go on with a text."""
    said = about.get("capabilities", [])
    names = said.split(",") if isinstance(said, str) else list(said)
    return [str(name).strip() for name in names if name] or ["completion"]


def _context(model: Model, about: Mapping[str, Any]) -> int:
    return _int(about.get("context_tokens") or about.get("context_length")) or model.context_tokens


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0
