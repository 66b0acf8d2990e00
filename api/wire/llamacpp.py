"""llama.cpp's own `POST /completion`.

Fields and answers are those of https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md. Hints about
the cache are taken and mean nothing here; what would change the answer and cannot be honoured is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import sse
from headrace.api.wire.checks import INT64_MAX, MAX_BIASES, TOKEN_ID_MAX, Range, in_ranges, refuse, stops, token_ids
from headrace.api.wire.format import Parsed
from headrace.api.wire.llamacpp_fold import LlamacppFold, LlamacppWhole, envelope
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import Constraint, Grammar, Job, JsonSchema, Sampling, Text, Tokens, View
from headrace.broker.settings import ApiSettings

NEVER = -1e9
"""The bias of a token that must not come: `false` in place of a number."""

_RANGES: tuple[Range, ...] = (
    ("n_predict", -1, INT64_MAX),
    ("max_tokens", -1, INT64_MAX),
    ("temperature", 0, 100),
    ("top_k", -INT64_MAX, INT64_MAX),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("repeat_penalty", 0, 100),
    ("repeat_last_n", -1, INT64_MAX),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("seed", -INT64_MAX - 1, INT64_MAX),
    ("n_probs", 0, 20),
)

_HARMLESS: dict[str, tuple[object, ...]] = {
    "post_sampling_probs": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "response_fields": ([],),
    "n_discard": (0,),
    "n_keep": (0,),
    "n_indent": (0,),
    "n_cmpl": (1,),
    "n": (1,),
    "min_keep": (0,),
    "t_max_predict_ms": (0, -1),
    "id_slot": (-1,),
    "lora": ([],),
    "samplers": (),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "top_n_sigma": (-1, -1.0),
    "image_data": ([],),
    "multimodal_data": ([],),
    "sse_ping_interval": (),
}
"""Not supported, and the values that ask for nothing. What only tunes one of these (`dry_base`) is not looked at."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
)


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """The fields of this route; those typed Any are not supported, see `refuse`."""

    prompt: Any
    model: str | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[tuple[int | str, float | bool]] | dict[str, float | bool] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    post_sampling_probs: Any = None
    timings_per_token: Any = None
    return_progress: Any = None
    response_fields: Any = None
    n_discard: Any = None
    n_keep: Any = None
    n_indent: Any = None
    n_cmpl: Any = None
    n: Any = None
    min_keep: Any = None
    t_max_predict_ms: Any = None
    id_slot: Any = None
    lora: Any = None
    samplers: Any = None
    mirostat: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    top_n_sigma: Any = None
    image_data: Any = None
    multimodal_data: Any = None
    sse_ping_interval: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest)


class LlamacppWire(sse.SSEWire):
    """How all formats of llama.cpp's stand on the wire."""

    def envelope(self, error: HeadraceError) -> bytes:
        return envelope(error)


class LlamacppCompletion(LlamacppWire):
    """See the module and `format.Format`."""

    name: str = "llamacpp.completion"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        refuse(request, _HARMLESS)
        in_ranges(request, _RANGES)
        job = Job(
            "",
            request.model or "",
            _prompt(request.prompt),
            max_tokens=_max_tokens(request),
            stop=stops(request.stop, limits),
            sampling=_sampling(request),
            logprobs=request.n_probs or None,
            constraint=_constraint(request),
            ignore_eos=bool(request.ignore_eos),
        )
        options = {"settings": _settings(request, job), "return_tokens": bool(request.return_tokens)}
        return Parsed(job, stream=bool(request.stream), options=options)

    def fold(self, job_id: str, view: View) -> LlamacppFold:
        return LlamacppFold(view)

    def whole(self, job_id: str, view: View) -> LlamacppWhole:
        return LlamacppWhole(view)


def _prompt(prompt: Any) -> Text | Tokens:
    """One prompt, as text or as tokens; text and tokens mixed, several prompts, and images are refused."""
    match prompt:
        case [str() as one]:
            return _prompt(one)
        case str():
            if not prompt:
                raise BadRequest("prompt must not be empty.", param="prompt")
            return Text(prompt)
        case [int(), *_] if all(type(each) is int for each in prompt):
            return Tokens(token_ids(prompt, "prompt"))
        case [[int(), *_] as one]:
            return _prompt(one)
    raise BadRequest("prompt must be one text, or one list of token ids; no mixture of both.", param="prompt")


def _max_tokens(request: CompletionRequest) -> int | None:
    """`n_predict`, or `max_tokens`, as llama-server takes it too; -1 is to the end of the context."""
    limit = request.max_tokens if request.n_predict is None else request.n_predict
    return None if limit == -1 else limit


def _sampling(request: CompletionRequest) -> Sampling:
    # any seed below 0 asks for a random one
    seed = request.seed if request.seed is not None and request.seed >= 0 else None
    given = {name: getattr(request, name) for name in _SAMPLING}
    return Sampling(**given, seed=seed, logit_bias=_logit_bias(request) or None)


def _logit_bias(request: CompletionRequest) -> dict[int, float]:
    """`[[id, bias], ...]` or `{"id": bias}`; `false` is never. Tokens as text would need a tokenizer here."""
    given = request.logit_bias or []
    pairs = list(given.items()) if isinstance(given, dict) else given
    if len(pairs) > MAX_BIASES:
        raise BadRequest(f"logit_bias must have at most {MAX_BIASES} entries.", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        if isinstance(key, str) and not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise BadRequest("The tokens of logit_bias must be token ids.", param="logit_bias")
        if bias is True or not 0 <= int(key) <= TOKEN_ID_MAX or not abs(bias) <= -NEVER:
            raise BadRequest("logit_bias must hold token ids, each with a number or false.", param="logit_bias")
        biases[int(key)] = NEVER if bias is False else bias
    return biases


def _constraint(request: CompletionRequest) -> Constraint | None:
    if request.grammar and request.json_schema is not None:
        raise BadRequest("Either grammar or json_schema, not both.", param="grammar")
    if request.json_schema is not None:
        return JsonSchema(request.json_schema)
    return Grammar(request.grammar) if request.grammar else None


def _settings(request: CompletionRequest, job: Job) -> dict[str, Any]:
    """What `generation_settings` shows: what was asked for; what was not is the model's own default."""
    given = {
        name: getattr(request, name) for name in (*_SAMPLING, "seed", "grammar") if getattr(request, name) is not None
    }
    limit = -1 if job.max_tokens is None else job.max_tokens
    shown = {"n_predict": limit, "max_tokens": limit, "stop": job.stop, "ignore_eos": job.ignore_eos}
    return {**given, **shown, "n_probs": job.logprobs or 0, "stream": bool(request.stream)}
