"""Ollama's API on the wire: a JSON object a line, errors as one string, durations in nanoseconds.

Names and shapes are those of https://github.com/ollama/ollama/blob/main/docs/api.md. Every line also has an `id`:
where to go on from if the connection breaks; clients pass over it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from headrace.api.wire import sse
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import Timings, Usage

MEDIA_TYPE = "application/x-ndjson"

_NS_PER_MS = 1_000_000
_DURATION = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]+)?|(?:[0-9]+(?:\.[0-9]+)?(?:ns|us|µs|μs|ms|s|m|h))+)")


Say = Callable[[HeadraceError], bytes]
"""An error in a format's words."""


class Load(Exception):
    """A request without a prompt asks for the model itself to be loaded or unloaded; `body` is the answer.

    Nothing is to be done: when models are loaded is not a caller's to say here, and others may be using this one.
    """

    def __init__(self, model: str, body: bytes) -> None:
        self.model = model
        self.body = body
        super().__init__(model)


def is_unload(keep_alive: str | float | None) -> bool:
    """Check `keep_alive`, seconds or a Go duration such as `1h30m`; True if it is zero. Raises BadRequest."""
    if keep_alive is None or isinstance(keep_alive, int | float):
        return keep_alive == 0
    if not _DURATION.fullmatch(keep_alive):
        raise BadRequest("keep_alive must be a number of seconds, or a duration such as 5m.", param="keep_alive")
    return not any(digit in keep_alive for digit in "123456789")


def stamp(ms: int) -> str:
    """Epoch milliseconds by RFC 3339."""
    return f"{datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec='milliseconds')[:-6]}Z"


def now() -> str:
    return stamp(round(datetime.now(UTC).timestamp() * 1000))


def metrics(usage: Usage | None, timings: Timings | None, at_ms: int) -> dict[str, int]:
    """What the last object says of the work; `at_ms` is its age when it ended, waiting included.

    What passed before the model began counts as loading: with Ollama, too, that is waiting for a runner.
    """
    usage, timings = usage or Usage(0, 0), timings or Timings(0, 0, 0)
    total_ms = max(at_ms, timings.queue_ms + timings.prefill_ms + timings.decode_ms)
    return {
        "total_duration": total_ms * _NS_PER_MS,
        "load_duration": timings.queue_ms * _NS_PER_MS,
        "prompt_eval_count": usage.prompt_tokens,
        "prompt_eval_duration": timings.prefill_ms * _NS_PER_MS,
        "eval_count": usage.completion_tokens,
        "eval_duration": timings.decode_ms * _NS_PER_MS,
    }


class OllamaWire:
    """How its formats stand on the wire. The last line says itself that it is the last."""

    media_type: str = MEDIA_TYPE
    terminator: bytes = b""
    joins_text: bool = True
    fields: Mapping[str, str] = {"response_format": "format"}
    """What workers call otherwise than Ollama does."""

    def frame(self, position: str, payload: bytes) -> bytes:
        if not position:
            return payload + b"\n"
        return b'{"id":"%b",%b\n' % (position.encode(), payload[1:])

    def error_frame(self, error: HeadraceError) -> bytes:
        """Ollama has no place for a field's name, so the message says it."""
        message, param = error.message, self.fields.get(error.param or "", error.param)
        if param and param not in message:
            message = f"{param}: {message}"
        return sse.encode({"error": message})

    def error_body(self, error: HeadraceError) -> bytes:
        return self.error_frame(error)
