"""`POST /api/generate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.api.body import decode
from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama import Load, OllamaWire
from headrace.api.wire.ollama_fold import OllamaFold, OllamaWhole, Shape, heartbeat, loaded, said_members
from headrace.api.wire.ollama_request import Request, is_load, parsed
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Message, Prompt, Text, View
from headrace.broker.settings import ApiSettings

_UNSUPPORTED = ("template", "context", "images", "width", "height", "steps")


class GenerateRequest(Request, frozen=True, kw_only=True):
    """The fields of this route; those typed Any are not supported, see `_UNSUPPORTED`."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    template: Any = None
    context: Any = None
    images: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None


_decoder = msgspec.json.Decoder(GenerateRequest)


class OllamaGenerate(OllamaWire):
    """Ollama's generate; see `format.Format`."""

    name: str = "ollama.generate"
    fields: Mapping[str, str] = {**OllamaWire.fields, "messages": "prompt"}

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        """Raises also `Load`, for a request without a prompt."""
        request = decode(_decoder, body, limits)
        for name in _UNSUPPORTED:
            if getattr(request, name):
                raise BadRequest(f"{name} is not supported here.", param=name)
        if not request.prompt and not request.suffix:
            reason = "load" if is_load(request) else "unload"
            raise Load(request.model, loaded(SHAPE, request.model, reason))
        return parsed(request, _prompt(request), limits, suffix=request.suffix or None)

    def fold(self, job_id: str, view: View) -> OllamaFold:
        return OllamaFold(SHAPE, view, self.error_frame)

    def whole(self, job_id: str, view: View) -> OllamaWhole:
        return OllamaWhole(SHAPE, view)

    def heartbeat(self, note: str, view: View) -> bytes:
        return heartbeat(SHAPE, view) + b"\n"


def _prompt(request: GenerateRequest) -> Prompt:
    """A conversation of one turn; the bare text if it is raw, or has a suffix to be led up to."""
    text = request.prompt or ""
    if not request.raw and not request.suffix:
        system = [Message("system", request.system)] if request.system else []
        return Chat([*system, Message("user", text)])
    if request.system:
        raise BadRequest("system is not supported together with raw or suffix.", param="system")
    return Text(text)


def _said(content: Mapping[str, object]) -> dict[str, object]:
    members = said_members({name: value for name, value in content.items() if name != "tool_calls"})
    return {"response": members.pop("content"), **members}


SHAPE = Shape(said=_said, text=(b'"response":', b""))
