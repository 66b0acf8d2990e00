"""TGI's `POST /generate`, `/generate_stream`, and `/`, where the body's `stream` decides.

Fields and answers are those of https://huggingface.github.io/text-generation-inference. What cannot be honoured is
refused by name; a bad request is a 422 there.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import sse
from headrace.api.wire.bounds import schema_of
from headrace.api.wire.checks import INT64_MAX, Range, in_ranges, refuse, stops
from headrace.api.wire.format import Parsed
from headrace.api.wire.tgi_fold import TGIFold, TGIWhole, envelope, status_of
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import Constraint, Job, JsonObject, JsonSchema, Regex, Sampling, Text, View
from headrace.broker.settings import ApiSettings

Mode = Literal["whole", "stream", "body"]
"""What says whether the answer is a stream: the route, or the body."""

DEFAULT_NEW_TOKENS = 100
"""TGI's, where a request says nothing; other formats go on to the end."""

_ABOVE_0 = 1e-9
_RANGES: tuple[Range, ...] = (
    ("max_new_tokens", 1, INT64_MAX),
    ("temperature", _ABOVE_0, 100),
    ("top_k", 1, INT64_MAX),
    ("top_p", _ABOVE_0, 1),
    ("typical_p", _ABOVE_0, 1),
    ("repetition_penalty", _ABOVE_0, 100),
    ("frequency_penalty", -2, 2),
    ("seed", 0, INT64_MAX),
    ("top_n_tokens", 0, 20),
)
_HARMLESS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "decoder_input_details": (False,),
    "watermark": (False,),
    "truncate": (),
    "adapter_id": (),
}


class GrammarChoice(Struct, frozen=True):
    """TGI's `grammar`: what `value` is depends on `type`."""

    type: str
    value: Any = None


class Parameters(Struct, frozen=True, kw_only=True):
    """`parameters`; those typed Any are not supported, see `refuse`."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    do_sample: bool | None = None
    details: bool | None = None
    top_n_tokens: int | None = None
    return_full_text: bool | None = None
    grammar: GrammarChoice | None = None
    best_of: Any = None
    decoder_input_details: Any = None
    watermark: Any = None
    truncate: Any = None
    adapter_id: Any = None


class GenerateRequest(Struct, frozen=True, kw_only=True):
    """The body; `model` is our addition, since TGI serves one."""

    inputs: str
    parameters: Parameters | None = None
    stream: bool | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(GenerateRequest)


class TGI(sse.SSEWire):
    """See the module and `format.Format`. All modes are one format: they differ only in how a body is read."""

    name: str = "tgi"

    def __init__(self, mode: Mode = "body") -> None:
        self._mode = mode

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        asked = request.parameters or Parameters()
        refuse(asked, _HARMLESS)
        in_ranges(asked, _RANGES)
        if not request.inputs:
            raise BadRequest("inputs must not be empty.", param="inputs")
        job = Job(
            "",
            request.model or "",
            Text(request.inputs),
            max_tokens=asked.max_new_tokens or DEFAULT_NEW_TOKENS,
            stop=stops(asked.stop, limits),
            sampling=_sampling(asked),
            logprobs=asked.top_n_tokens or 0,
            constraint=_constraint(asked.grammar),
        )
        is_stream = bool(request.stream) if self._mode == "body" else self._mode == "stream"
        return Parsed(job, is_stream, options=self._options(request, asked))

    def _options(self, request: GenerateRequest, asked: Parameters) -> dict[str, Any]:
        options = {
            "details": asked.details,
            "seed": asked.seed,
            "top_n_tokens": asked.top_n_tokens,
            "prompt": request.inputs if asked.return_full_text else None,
            "is_list": True if self._mode == "body" else None,
        }
        return {name: value for name, value in options.items() if value is not None}

    def fold(self, job_id: str, view: View) -> TGIFold:
        return TGIFold(view)

    def whole(self, job_id: str, view: View) -> TGIWhole:
        return TGIWhole(view)

    def envelope(self, error: HeadraceError) -> bytes:
        return envelope(error)

    def error_status(self, error: HeadraceError) -> int:
        return status_of(error)


def _sampling(asked: Parameters) -> Sampling:
    """Greedy unless something asks for sampling, as in TGI; its temperature is 1 then."""
    samples = bool(asked.do_sample) or any(
        value is not None for value in (asked.temperature, asked.top_k, asked.top_p, asked.typical_p)
    )
    return Sampling(
        temperature=(asked.temperature or 1.0) if samples else 0.0,
        top_p=asked.top_p,
        top_k=asked.top_k,
        typical_p=asked.typical_p,
        seed=asked.seed,
        frequency_penalty=asked.frequency_penalty,
        repeat_penalty=asked.repetition_penalty,
    )


def _constraint(grammar: GrammarChoice | None) -> Constraint | None:
    match grammar:
        case None:
            return None
        case GrammarChoice("json" | "json_object", str() as text):
            return _schema_of(text)
        case GrammarChoice("json_object", None):
            return JsonObject()
        case GrammarChoice("json" | "json_object", dict() as schema):
            return JsonSchema(schema)
        case GrammarChoice("json_schema", {"schema": dict() as schema}):
            return JsonSchema(schema)
        case GrammarChoice("regex", str() as pattern) if pattern:
            return Regex(pattern)
    raise BadRequest("grammar must be of type json, json_schema or regex, with a value of that kind.", param="grammar")


def _schema_of(text: str) -> JsonSchema:
    schema = schema_of(text, "grammar")
    if not isinstance(schema, dict):
        raise BadRequest("The value of grammar is not a JSON schema.", param="grammar")
    return JsonSchema(schema)
