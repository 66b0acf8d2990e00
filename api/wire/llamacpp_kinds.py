"""llama.cpp's small routes: `/tokenize`, `/detokenize`, `/apply-template`, `/embedding`.

Each is a job of its kind, because only a worker has the model's vocabulary and template.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import sse, turns
from headrace.api.wire.checks import JSON_INT_MAX, refuse, token_ids
from headrace.api.wire.ends import OneFrame
from headrace.api.wire.format import Parsed
from headrace.api.wire.llamacpp import LlamacppWire
from headrace.api.wire.llamacpp_fold import envelope
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Batch, Job, ReadEntry, Result, Text, Tokens, View
from headrace.broker.settings import ApiSettings

_MAX_INPUTS = 2048
"""How many texts one `/embedding` may hold."""


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    content: str
    model: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None
    parse_special: Any = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TemplateRequest(Struct, frozen=True, kw_only=True):
    messages: msgspec.Raw
    model: str | None = None
    tools: Any = None
    chat_template_kwargs: Any = None


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    content: str | list[str | list[int]]
    model: str | None = None
    embd_normalize: Any = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_template_decoder = msgspec.json.Decoder(TemplateRequest)
_embedding_decoder = msgspec.json.Decoder(EmbeddingRequest)


class ResultWhole:
    """The one answer of a job that generates nothing; `show` says it."""

    def __init__(self, show: Callable[[dict[str, Any]], object]) -> None:
        self._show = show
        self._data: dict[str, Any] = {}

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            if isinstance(event, Result):
                self._data = event.data

    def body(self) -> bytes:
        return sse.encode(self._show(self._data))


class _Kind(LlamacppWire):
    """What these formats share: one answer, shown one way."""

    def show(self, data: dict[str, Any], view: View) -> object:
        raise NotImplementedError

    def whole(self, job_id: str, view: View) -> ResultWhole:
        return ResultWhole(lambda data: self.show(data, view))

    def fold(self, job_id: str, view: View) -> OneFrame:
        return OneFrame(self.whole(job_id, view), envelope)


class LlamacppTokenize(_Kind):
    """`POST /tokenize`."""

    name: str = "llamacpp.tokenize"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_tokenize_decoder, body, limits)
        refuse(request, {"parse_special": (True,)})
        add_special = bool(request.add_special)
        job = Job("", request.model or "", Text(request.content), kind="tokenize", add_special=add_special)
        return Parsed(job, stream=False, options={"with_pieces": bool(request.with_pieces)})

    def show(self, data: dict[str, Any], view: View) -> object:
        ids = data.get("tokens", [])
        if not view.options.get("with_pieces"):
            return {"tokens": ids}
        return {"tokens": [{"id": id, "piece": _piece(piece)} for id, piece in zip(ids, data["pieces"], strict=True)]}


class LlamacppDetokenize(_Kind):
    """`POST /detokenize`."""

    name: str = "llamacpp.detokenize"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_detokenize_decoder, body, limits)
        # what is an id of its vocabulary, the model says: the scripted engine's are larger than any real one's
        ids = token_ids(request.tokens, "tokens", JSON_INT_MAX)
        return Parsed(Job("", request.model or "", Tokens(ids), kind="detokenize"), stream=False)

    def show(self, data: dict[str, Any], view: View) -> object:
        return {"content": data.get("text", "")}


class LlamacppTemplate(_Kind):
    """`POST /apply-template`."""

    name: str = "llamacpp.apply-template"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_template_decoder, body, limits)
        refuse(request, {"tools": ([],), "chat_template_kwargs": ({},)})
        job = Job("", request.model or "", turns.chat(request.messages, limits), kind="render")
        return Parsed(job, stream=False)

    def show(self, data: dict[str, Any], view: View) -> object:
        return {"prompt": data.get("text", "")}


class LlamacppEmbedding(_Kind):
    """`POST /embedding`; vectors are normalized, as llama-server does by default."""

    name: str = "llamacpp.embedding"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_embedding_decoder, body, limits)
        refuse(request, {"embd_normalize": (2,)})
        given = [request.content] if isinstance(request.content, str) else request.content
        if not 1 <= len(given) <= _MAX_INPUTS or not all(given):
            raise BadRequest(f"content must hold from 1 to {_MAX_INPUTS} texts, none empty.", param="content")
        inputs = [Text(each) if isinstance(each, str) else Tokens(token_ids(each, "content")) for each in given]
        return Parsed(Job("", request.model or "", Batch(inputs), kind="embed"), stream=False)

    def show(self, data: dict[str, Any], view: View) -> object:
        return [{"index": n, "embedding": [_floats(raw)]} for n, raw in enumerate(data.get("embeddings", []))]


def _piece(piece: bytes) -> str | list[int]:
    """Text, or the list of its bytes if it is none."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _floats(raw: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
