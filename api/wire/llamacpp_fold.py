"""The fold of llama.cpp's completions, and its errors.

The stream has no end marker: its last event has `stop` true.
"""

from __future__ import annotations

from typing import Any

from headrace.api.wire import sse
from headrace.api.wire.ends import error_of
from headrace.broker.errors import ContextLengthExceeded, HeadraceError
from headrace.broker.messages import (
    Alternative,
    Delta,
    Ended,
    Finished,
    ReadEntry,
    Started,
    Timings,
    TokenLogprob,
    Usage,
    View,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "not_supported_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}
_FIELDS = {"response_format": "json_schema", "logprobs": "n_probs", "input": "content"}
"""What workers call otherwise than llama-server does."""
_LEAST = -3.4028234663852886e38
"""llama-server's word for the logarithm of 0: the lowest float."""


def envelope(error: HeadraceError) -> bytes:
    """An error as llama-server says it, in place of a response or in a stream."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    said: dict[str, object] = {"code": error.status, "message": error.message, "type": kind}
    if isinstance(error, ContextLengthExceeded):
        said["type"] = "exceed_context_size_error"
        if counts := error.counts:
            said["n_prompt_tokens"], said["n_ctx"] = counts
    elif error.param:
        said["param"] = _FIELDS.get(error.param, error.param)
    return sse.encode({"error": said})


class _Choice:
    """What is known of one choice so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.has_new_line = False
        self.finish: Finished | None = None

    def add(self, event: Delta) -> None:
        self.token_ids += event.token_ids
        self.has_new_line = self.has_new_line or "\n" in event.text


class LlamacppFold:
    """A stream; see `format.Fold`. `index` is the choice, as llama-server has it for several completions."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._choices = [_Choice() for _ in range(view.n)]
        self._prompt_tokens = 0

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Started():
                    self._prompt_tokens = event.prompt_tokens
                case Delta():
                    choice = self._choices[event.choice]
                    choice.add(event)
                    if event.text or event.token_ids:
                        frames.append(self._partial(event, len(choice.token_ids)))
                case Finished():
                    self._choices[event.choice].finish = event
                case Ended(status="done"):
                    frames += [
                        sse.encode(_final(index, choice, self._view, event, is_stream=True))
                        for index, choice in enumerate(self._choices)
                    ]
                case Ended():
                    frames.append(envelope(error_of(event)))
        return frames

    def _partial(self, event: Delta, predicted: int) -> bytes:
        said: dict[str, object] = {
            "index": event.choice,
            "content": event.text,
            "tokens": event.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": predicted,
            "tokens_evaluated": self._prompt_tokens,
        }
        if event.logprobs and self._view.logprobs:
            said["completion_probabilities"] = _probabilities(event.logprobs)
        return sse.encode(said)


class LlamacppWhole:
    """A response in one piece; see `format.Whole`."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._choice = _Choice()
        self._ended = Ended("done")

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Delta(choice=0):
                    self._choice.add(event)
                    self._choice.texts.append(event.text)
                    self._choice.logprobs += event.logprobs or []
                case Finished(choice=0):
                    self._choice.finish = event
                case Ended():
                    self._ended = event

    def body(self) -> bytes:
        said = _final(0, self._choice, self._view, self._ended, is_stream=False)
        if self._view.logprobs:
            said["completion_probabilities"] = _probabilities(self._choice.logprobs)
        return sse.encode(said)


def _final(index: int, choice: _Choice, view: View, ended: Ended, *, is_stream: bool) -> dict[str, Any]:
    usage = ended.usage or Usage(0, 0)
    settings = view.options.get("settings", {})
    stop_type, word = _stop(choice.finish)
    predicted = len(choice.token_ids)
    limit = settings.get("n_predict", -1)
    return {
        "index": index,
        "content": "" if is_stream else "".join(choice.texts),
        "tokens": choice.token_ids if view.options.get("return_tokens") and not is_stream else [],
        "id_slot": -1,
        "stop": True,
        "model": view.model,
        "tokens_predicted": predicted,
        "tokens_evaluated": usage.prompt_tokens,
        "generation_settings": settings,
        "has_new_line": choice.has_new_line,
        # a limit that was not asked for is that of the context
        "truncated": stop_type == "limit" and (limit == -1 or predicted < limit),
        "stop_type": stop_type,
        "stopping_word": word,
        "tokens_cached": usage.cached_tokens,
        "timings": _timings(ended.timings or Timings(0, 0, 0), usage, predicted),
    }


def _stop(finish: Finished | None) -> tuple[str, str]:
    if finish is None:
        return "none", ""
    if finish.reason == "length":
        return "limit", ""
    return ("word", finish.stop) if finish.stop is not None else ("eos", "")


def _timings(timings: Timings, usage: Usage, predicted: int) -> dict[str, float]:
    prompt = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_pace("prompt", prompt, timings.prefill_ms),
        **_pace("predicted", predicted, timings.decode_ms),
    }


def _pace(name: str, count: int, ms: int) -> dict[str, float]:
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / count if count else 0.0,
        f"{name}_per_second": 1000 * count / ms if ms else 0.0,
    }


def _probabilities(tokens: list[TokenLogprob]) -> list[dict[str, object]]:
    return [{**_shown(token), "top_logprobs": [_shown(other) for other in token.top]} for token in tokens]


def _shown(token: TokenLogprob | Alternative) -> dict[str, object]:
    text = token.piece.decode(errors="ignore")
    return {
        "id": token.token_id,
        "token": text,
        "bytes": list(token.piece),
        "logprob": max(_LEAST, token.logprob),
    }
