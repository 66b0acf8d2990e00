"""`POST /api/embed`, and `POST /api/embeddings`, which came before it."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import sse
from headrace.api.wire.ends import OneFrame
from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama import Load, OllamaWire, is_unload, metrics
from headrace.api.wire.ollama_fold import model_of
from headrace.api.wire.ollama_request import Options, check_model, check_options
from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import Batch, Ended, Job, ReadEntry, Result, Text, View
from headrace.broker.settings import ApiSettings

MAX_INPUTS = 2048


class EmbedRequest(Struct, frozen=True, kw_only=True):
    """`truncate` is a hint: what is too long is always refused here, never cut."""

    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


class EmbeddingsRequest(Struct, frozen=True, kw_only=True):
    """The older route: one input."""

    model: str
    prompt: str | None = None
    options: Options | None = None
    keep_alive: str | float | None = None


_embed = msgspec.json.Decoder(EmbedRequest)
_embeddings = msgspec.json.Decoder(EmbeddingsRequest)


class OllamaEmbed(OllamaWire):
    """Ollama's embeddings, each of length 1; see `format.Format`."""

    name: str = "ollama.embed"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        """Raises also `Load`, for a request without input."""
        request = decode(_embed, body, limits)
        _check(request)
        inputs = [request.input] if isinstance(request.input, str) else request.input
        if inputs in ([], [""]):
            raise Load(request.model, sse.encode({"model": request.model, "embeddings": []}))
        if len(inputs) > MAX_INPUTS:
            raise BadRequest(f"input must have at most {MAX_INPUTS} strings.", param="input")
        if request.dimensions is not None and request.dimensions < 0:
            raise BadRequest("dimensions must not be negative.", param="dimensions")
        options = {"asked": request.model, "dimensions": request.dimensions or None}
        return Parsed(_job(request.model, inputs), stream=False, options=options)

    def fold(self, job_id: str, view: View) -> OneFrame:
        return OneFrame(EmbedWhole(view), self.error_frame)

    def whole(self, job_id: str, view: View) -> EmbedWhole:
        return EmbedWhole(view)

    def heartbeat(self, note: str, view: View) -> bytes:
        return b'{"done":false}\n'


class OllamaEmbeddings(OllamaEmbed):
    """The older route: one embedding, as the model gives it."""

    name: str = "ollama.embeddings"
    fields: Mapping[str, str] = {"input": "prompt"}

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_embeddings, body, limits)
        _check(request)
        if not request.prompt:
            raise Load(request.model, sse.encode({"embedding": []}))
        return Parsed(_job(request.model, [request.prompt]), stream=False, options={"asked": request.model})

    def fold(self, job_id: str, view: View) -> OneFrame:
        return OneFrame(EmbeddingsWhole(view), self.error_frame)

    def whole(self, job_id: str, view: View) -> EmbeddingsWhole:
        return EmbeddingsWhole(view)


class EmbedWhole:
    """Embeddings; see `format.Whole`."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._vectors: list[list[float]] | None = None
        self._end: tuple[Ended, int] = (Ended("done"), 0)

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Result():
                    self._vectors = [_floats(each) for each in event.data["embeddings"]]
                case Ended():
                    self._end = (event, entry.at_ms)

    def vectors(self) -> list[list[float]]:
        if self._vectors is None:
            raise EngineFailed("there are no embeddings")
        return self._vectors

    def body(self) -> bytes:
        dimensions = self.view.options.get("dimensions")
        embeddings = [_unit(vector[:dimensions]) for vector in self.vectors()]
        event, at_ms = self._end
        measured = metrics(event.usage, event.timings, at_ms)
        shown = {name: measured[name] for name in ("total_duration", "load_duration", "prompt_eval_count")}
        return sse.encode({"model": model_of(self.view), "embeddings": embeddings, **shown})


class EmbeddingsWhole(EmbedWhole):
    """One embedding."""

    def body(self) -> bytes:
        return sse.encode({"embedding": self.vectors()[0]})


def _check(request: EmbedRequest | EmbeddingsRequest) -> None:
    check_model(request.model)
    is_unload(request.keep_alive)
    check_options(request.options or Options())


def _job(model: str, inputs: list[str]) -> Job:
    return Job("", model, Batch([Text(each) for each in inputs]), kind="embed")


def _floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _unit(vector: list[float]) -> list[float]:
    """The vector at length 1; one of nothing but zeros stays."""
    length = math.hypot(*vector)
    return [each / length for each in vector] if length else vector
