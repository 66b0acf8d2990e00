"""What chat and generate share on the way in: options, formats, thinking."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama import is_unload
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Constraint, Job, JsonObject, JsonSchema, Prompt, Sampling
from headrace.broker.settings import ApiSettings

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
RANDOM_SEED = -1

_RANGES: tuple[tuple[str, float, float], ...] = (
    ("num_predict", -2, INT64_MAX),
    ("temperature", 0, 100),
    ("top_p", 0, 1),
    ("top_k", 0, INT32_MAX),
    ("min_p", 0, 1),
    ("typical_p", 0, 1),
    ("repeat_penalty", 0.01, 100),
    ("repeat_last_n", -1, INT32_MAX),
    ("seed", INT64_MIN, INT64_MAX),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_HARMLESS: dict[str, object] = {
    "mirostat": 0,
    "tfs_z": 1,
    "penalize_newline": True,
    "vocab_only": False,
    "logits_all": False,
    "embedding_only": False,
}
"""Options that would change the answer and are not supported, each with the value that changes nothing."""
_LEVELS = ("low", "medium", "high")


class Options(Struct, frozen=True):
    """`options`. Those from `num_ctx` on say how a model is to be loaded: hints, since that is the deployment's."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None
    vocab_only: bool | None = None
    logits_all: bool | None = None
    embedding_only: bool | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class Request(Struct, frozen=True, kw_only=True):
    """The fields of both routes; None is what null and an absent field both mean."""

    model: str
    stream: bool | None = None
    format: Any = None
    options: Options | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    n: int | None = None


def check_model(model: str) -> None:
    if not model:
        raise BadRequest("model is required.", param="model")


def is_load(request: Request) -> bool:
    """Check what a request without a prompt may say; True if it does not ask for an unload."""
    check_model(request.model)
    return not is_unload(request.keep_alive)


def parsed(request: Request, prompt: Prompt, limits: ApiSettings, **fields: Any) -> Parsed:
    """Check the common fields and put them together with those of the route; raises BadRequest."""
    is_load(request)
    if request.n not in (None, 1):
        raise BadRequest("n other than 1 is not supported here.", param="n")
    options = request.options or Options()
    check_options(options)
    job = Job(
        "",
        request.model,
        prompt,
        # -1 is without end and -2 until the context is full; 0 is no limit either, as Ollama's runner takes it
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
        stop=_stops(options.stop, limits),
        sampling=_sampling(options),
        logprobs=_logprobs(request),
        constraint=_constraint(request.format),
        think=_think(request.think),
        **fields,
    )
    return Parsed(job, stream=request.stream is not False, options={"asked": request.model})


def check_options(options: Options) -> None:
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"options.{name} must be from {low} to {high}.", param=f"options.{name}")
    for name, harmless in _HARMLESS.items():
        if getattr(options, name) not in (None, harmless):
            raise BadRequest(f"options.{name} is not supported here.", param=f"options.{name}")


def _sampling(options: Options) -> Sampling:
    return Sampling(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=None if options.seed == RANDOM_SEED else options.seed,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n,
        typical_p=options.typical_p,
    )


def _stops(stop: str | list[str] | None, limits: ApiSettings) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > limits.max_stops:
        raise BadRequest(f"options.stop must have at most {limits.max_stops} strings.", param="options.stop")
    if not all(1 <= len(each) <= limits.max_stop_chars for each in stops):
        raise BadRequest(
            f"options.stop must have from 1 to {limits.max_stop_chars} characters each.", param="options.stop"
        )
    return stops


def _constraint(wanted: Any) -> Constraint | None:
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        return JsonObject()
    if isinstance(wanted, dict):
        return JsonSchema(wanted)
    raise BadRequest('format must be "json" or a JSON schema.', param="format")


def _think(think: bool | str | None) -> bool | None:
    """A level is a hint: that the model is to think is what it says for sure."""
    if isinstance(think, str):
        if think not in _LEVELS:
            raise BadRequest(f"think must be true, false, {', '.join(_LEVELS)}.", param="think")
        return True
    return think


def _logprobs(request: Request) -> int | None:
    top = request.top_logprobs or 0
    if not 0 <= top <= 20:
        raise BadRequest("top_logprobs must be from 0 to 20.", param="top_logprobs")
    if top and not request.logprobs:
        raise BadRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    return top if request.logprobs else None
