"""What OpenAI's routes share on the way in, and in errors: the common fields, their bounds, the envelope.

Unknown fields are ignored, as OpenAI does, but not those that are known to change the answer and are not supported:
see `openai_extras`.
Bounds and names are those of https://platform.openai.com/docs/api-reference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct, structs

from headrace.api.wire import sse
from headrace.api.wire.checks import INT64_MAX, MAX_BIASES, TOKEN_ID_MAX, stops
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai_constraint import Constrained, constraint_of
from headrace.broker.errors import BadRequest, HeadraceError, JobEnded
from headrace.broker.messages import Band, Job, Prompt, Sampling
from headrace.broker.settings import ApiSettings

INT64_MIN = -(2**63)
INT32_MAX = 2**31 - 1

BANDS: Mapping[str, Band] = {"priority": "interactive", "default": "default", "auto": "default", "flex": "batch"}
"""What each `service_tier` asks for."""

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("seed", INT64_MIN, INT64_MAX),
    ("top_k", -1, INT32_MAX),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("repetition_penalty", 0.01, 10),
    ("repeat_penalty", 0.01, 10),
    ("repeat_last_n", -1, INT32_MAX),
)
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


class StreamOptions(Struct, frozen=True):
    """What a stream carries beside its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Constrained, frozen=True, kw_only=True):
    """The fields of every route that generates. None is what null and an absent field both mean; 0 is a value.

    Those from `top_k` on are not OpenAI's: vLLM and llama-server read them, each under its own name.
    """

    model: str
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    service_tier: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    ignore_eos: bool | None = None


class Request(Sampled, frozen=True, kw_only=True):
    """The fields of chat and completions."""

    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


def parsed(request: Request, prompt: Prompt, logprobs: int | None, limits: ApiSettings) -> Parsed:
    """Check the common fields and put them together with those of the route; raises BadRequest.

    `max_completion_tokens` wins over `max_tokens`; a limit beyond the context is the worker's to clamp.
    """
    job = job_of(request, prompt, limits)
    for name in ("max_tokens", "max_completion_tokens"):
        check_range(request, name, 1, INT64_MAX)
    check_range(request, "n", 1, limits.max_choices)
    job = structs.replace(
        job,
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        n=1 if request.n is None else request.n,
        logprobs=logprobs,
    )
    return Parsed(
        job,
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        band=band(request.service_tier),
    )


def job_of(request: Sampled, prompt: Prompt, limits: ApiSettings) -> Job:
    """Check the fields that all routes have; what only some have is still to be put in; raises BadRequest."""
    if not request.model:
        raise BadRequest("model must not be empty.", param="model")
    for name, low, high in _RANGES:
        check_range(request, name, low, high)
    return Job(
        "",
        request.model,
        prompt,
        stop=stops(request.stop, limits),
        sampling=_sampling(request),
        ignore_eos=bool(request.ignore_eos),
        constraint=constraint_of(request),
    )


def check_range(request: Sampled, name: str, low: float, high: float) -> None:
    """Refuse a number outside of its bounds. It is not repeated in the message: it may have thousands of digits."""
    value = getattr(request, name)
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name} must be from {low} to {high}.", param=name)


def _sampling(request: Sampled) -> Sampling:
    penalties = {request.repetition_penalty, request.repeat_penalty} - {None}
    if len(penalties) > 1:
        raise BadRequest("repeat_penalty and repetition_penalty say two things.", param="repeat_penalty")
    return Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else max(request.top_k, 0),  # vLLM's "all" is -1, llama.cpp's 0
        min_p=request.min_p,
        seed=request.seed,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=_logit_bias(request.logit_bias or {}) or None,
        repeat_penalty=penalties.pop() if penalties else None,
        repeat_last_n=request.repeat_last_n,
        typical_p=request.typical_p,
    )


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise BadRequest(f"logit_bias must have at most {MAX_BIASES} entries.", param="logit_bias")
    for key, value in biases.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) > TOKEN_ID_MAX:
            raise BadRequest("The keys of logit_bias must be token ids.", param="logit_bias")
        if not -100 <= value <= 100:
            raise BadRequest("The values of logit_bias must be from -100 to 100.", param="logit_bias")
    return {int(key): value for key, value in biases.items()}


def check_stream_options(request: Sampled) -> StreamOptions:
    """What a stream carries; raises BadRequest if there is no stream, or for what it cannot carry."""
    options = request.stream_options
    if options is None:
        return StreamOptions()
    if not request.stream:
        raise BadRequest("stream_options is only allowed when stream is true.", param="stream_options")
    for name in ("continuous_usage_stats", "include_obfuscation"):
        if getattr(options, name):
            raise BadRequest(f"{name} is not supported by this server.", param=f"stream_options.{name}")
    return options


def _include_usage(request: Request) -> bool:
    return bool(check_stream_options(request).include_usage)


def band(tier: str | None) -> Band | None:
    if tier is None:
        return None
    if tier not in BANDS:
        raise BadRequest(f"service_tier must be one of {', '.join(BANDS)}.", param="service_tier")
    return BANDS[tier]


def shown_error(error: HeadraceError, fields: Mapping[str, str]) -> dict[str, object]:
    """An error as OpenAI says it; `fields` is what workers call otherwise than the caller does."""
    param = fields.get(error.param, error.param) if error.param else None
    return {"message": error.message, "type": _type(error), "param": param, "code": error.code}


def _type(error: HeadraceError) -> str:
    """OpenAI's words: a wrong key is an `invalid_request_error` too; that a job ended is not its reader's mistake."""
    if error.status == 429:
        return "rate_limit_error"
    return "server_error" if error.status >= 500 or isinstance(error, JobEnded) else "invalid_request_error"


class OpenAIWire(sse.SSEWire):
    """How OpenAI's formats stand on the wire."""

    terminator: bytes = sse.DONE
    joins_text: bool = True
    fields: Mapping[str, str] = {"think": "reasoning_effort"}
    """What workers call otherwise than this format does."""

    def envelope(self, error: HeadraceError) -> bytes:
        return sse.encode({"error": shown_error(error, self.fields)})
