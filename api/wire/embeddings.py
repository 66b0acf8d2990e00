"""`POST /v1/embeddings`: a job of the kind `embed`, answered in one piece."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import openai_extras, sse
from headrace.api.wire.checks import token_ids
from headrace.api.wire.ends import OneFrame
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import OpenAIWire
from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import Batch, Job, ReadEntry, Result, Text, Tokens, View
from headrace.broker.settings import ApiSettings

MAX_INPUTS = 2048
MAX_DIMENSIONS = 1_000_000

_REFUSED: dict[str, tuple[object, ...]] = {
    "embed_dtype": ("float32",),
    "input_type": (),
    "messages": (),
    "normalize": (True,),
    "pooling": (),
    "stream": (False,),
    "task": (),
}


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """The fields of this route."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


_decoder = msgspec.json.Decoder(EmbeddingsRequest)
_check_extras = openai_extras.checker(EmbeddingsRequest.__struct_fields__, _REFUSED)


class Embeddings(OpenAIWire):
    """OpenAI's embeddings; see `format.Format`."""

    name: str = "openai.embeddings"
    fields: Mapping[str, str] = {"prompt": "input"}

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        _check_extras(body)
        if not request.model:
            raise BadRequest("model must not be empty.", param="model")
        if request.encoding_format not in (None, "float", "base64"):
            raise BadRequest("encoding_format must be float or base64.", param="encoding_format")
        if request.dimensions is not None and not 1 <= request.dimensions <= MAX_DIMENSIONS:
            raise BadRequest(f"dimensions must be from 1 to {MAX_DIMENSIONS}.", param="dimensions")
        options = {"encoding": request.encoding_format or "float", "dimensions": request.dimensions}
        job = Job("", request.model, Batch(_inputs(request.input)), kind="embed")
        return Parsed(job, stream=False, options={"embeddings": options})

    def fold(self, job_id: str, view: View) -> OneFrame:
        return OneFrame(self.whole(job_id, view), self.error_frame)

    def whole(self, job_id: str, view: View) -> EmbeddingsWhole:
        return EmbeddingsWhole(view)


class EmbeddingsWhole:
    """See `format.Whole`."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._options: dict[str, Any] = view.options.get("embeddings", {})
        self._data: dict[str, Any] = {}

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            if isinstance(event, Result):
                self._data = event.data

    def body(self) -> bytes:
        """The response; raises BadRequest if it has other dimensions than were asked for, and no replica had told."""
        embeddings, counts = self._data.get("embeddings"), self._data.get("tokens")
        if embeddings is None or counts is None:
            raise EngineFailed("the engine made no embeddings")
        for embedding in embeddings:
            if self._options.get("dimensions") not in (None, len(embedding) // 4):
                raise BadRequest(f"This model's embeddings have {len(embedding) // 4} dimensions.", param="dimensions")
        tokens = sum(counts)
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(embedding)}
            for index, embedding in enumerate(embeddings)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return sse.encode({"object": "list", "data": data, "model": self._view.model, "usage": usage})

    def _shown(self, embedding: bytes) -> str | tuple[float, ...]:
        """Base64 is of the little-endian float32 themselves."""
        if self._options.get("encoding") == "base64":
            return base64.b64encode(embedding).decode()
        return struct.unpack(f"<{len(embedding) // 4}f", embedding)


def check_dimensions(parsed: Parsed, has: int) -> None:
    """Refuse other dimensions than the model has, if they are known (not 0); raises BadRequest."""
    if has and parsed.options["embeddings"]["dimensions"] not in (None, has):
        raise BadRequest(f"This model's embeddings have {has} dimensions.", param="dimensions")


def _inputs(given: str | list[str | int | list[int]]) -> list[Text | Tokens]:
    """A string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(given, str):
        given = [given]
    elif given and all(isinstance(each, int) for each in given):
        given = [cast(list[int], given)]
    if not 1 <= len(given) <= MAX_INPUTS:
        raise BadRequest(f"There must be from 1 to {MAX_INPUTS} inputs.", param="input")
    if len({type(each) for each in given}) > 1 or isinstance(given[0], int):
        raise BadRequest("input must be a string, token ids, or a list of one of them.", param="input")
    return [_input(cast(str | list[int], each), f"input[{index}]") for index, each in enumerate(given)]


def _input(each: str | list[int], where: str) -> Text | Tokens:
    if not each:
        raise BadRequest(f"{where} must not be empty.", param=where)
    if isinstance(each, str):
        return Text(each)
    return Tokens(token_ids(each, where))
