"""Models as Ollama lists them.

What a model is comes from the settings, and from what its replicas say of it in the registry, as far as they say it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct

from headrace.api.wire.ollama import stamp
from headrace.broker.models import Model

_STARTED = stamp(round(time.time() * 1000))
_FOR_EVER = timedelta(days=365 * 100)
_CAPABILITIES = {"tools": "tools", "thinking": "reasoning", "insert": "fim", "embedding": "embeddings"}
"""Ollama's words, and those of a replica."""


class ShowRequest(Struct, frozen=True):
    """Which model; `name` is the older name of the field."""

    model: str = ""
    name: str = ""


Replicas = Mapping[str, Mapping[str, str]]


class Known(Struct, frozen=True):
    """A model, and what its replicas say: `about` of themselves, `details` of the model; either may be empty."""

    model: Model
    about: Mapping[str, str]
    details: Mapping[str, Any]

    @property
    def is_ready(self) -> bool:
        """A replica of it can answer now."""
        return self.about.get("state") == "ready"

    @property
    def context_tokens(self) -> int:
        """Of one sequence."""
        return _int(self.about.get("context_tokens")) or self.model.context_tokens


def serves(about: Mapping[str, str], name: str) -> bool:
    """Is what a replica says of itself that it serves this model, or has it as an adapter?"""
    return about.get("model") == name or name in msgspec.json.decode(about.get("adapters") or "[]")


def look_up(model: Model, replicas: Replicas) -> Known:
    """What is known of a model; replicas that are ready come first."""
    found = [about for about in replicas.values() if serves(about, model.name)]
    found.sort(key=lambda about: about.get("state") != "ready")
    about = found[0] if found else {}
    try:
        details = msgspec.json.decode(about.get("details") or "{}")
    except msgspec.DecodeError:
        details = {}
    return Known(model, about, details if isinstance(details, dict) else {})


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def _named(known: Known) -> dict[str, object]:
    """Clients need a digest that stays; where that of the model's file is not known, it is one of its settings."""
    name = _tagged(known.model.name)
    own = hashlib.sha256(msgspec.json.encode(known.model)).hexdigest()
    return {
        "name": name,
        "model": name,
        "size": _int(known.details.get("size_bytes")),
        "digest": str(known.details.get("digest") or own),
        "details": _details(known),
    }


def listed(known: Known) -> dict[str, object]:
    return {**_named(known), "modified_at": _STARTED}


def running(known: Known) -> dict[str, object]:
    return {
        **_named(known),
        "expires_at": (datetime.now(UTC) + _FOR_EVER).isoformat(timespec="seconds"),
        "size_vram": _int(known.details.get("size_bytes")) if known.model.gpus else 0,
        "context_length": known.context_tokens,
    }


def shown(known: Known) -> dict[str, object]:
    architecture = str(known.details.get("family") or "unknown")
    return {
        "license": "",
        "modelfile": f"FROM {known.model.name}\n",
        "parameters": f"num_ctx                        {known.context_tokens}",
        "template": str(known.details.get("chat_template", "")),
        "details": _details(known),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": known.model.name,
            "general.parameter_count": _int(known.details.get("parameters")),
            f"{architecture}.context_length": _int(known.details.get("context_tokens")) or known.context_tokens,
        },
        "capabilities": _capabilities(known.about),
        "modified_at": _STARTED,
    }


def _details(known: Known) -> dict[str, object]:
    family = str(known.details.get("family", ""))
    return {
        "parent_model": "",
        "format": str(known.details.get("format", "")),
        "family": family,
        "families": [family] if family else [],
        "parameter_size": _short(_int(known.details.get("parameters"))),
        "quantization_level": str(known.details.get("quantization", "")),
    }


def _short(parameters: int) -> str:
    """Their number as Ollama says it: 494.03M, 7.6B."""
    if parameters >= 1_000_000_000:
        return f"{parameters / 1e9:.1f}B"
    if parameters >= 1_000_000:
        return f"{parameters / 1e6:.2f}M"
    return f"{parameters / 1e3:.2f}K" if parameters else ""


def _capabilities(about: Mapping[str, str]) -> list[str]:
    """In Ollama's words; what a replica does not say of itself it cannot."""
    found = {name: _int(about.get(said)) for name, said in _CAPABILITIES.items()}
    return ["completion", *(name for name, can in found.items() if can)]


def _int(value: Any) -> int:
    try:
        return int(value or 0)
    except (TypeError, ValueError):
        return 0
