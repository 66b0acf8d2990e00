"""`/chat` and `/ws/chat`: the least that a stream of text can say, for `EventSource` and WebSockets.

An object for each step that made text: `{"token": "...", "done": false}`; the last has `done` true, `finish_reason` and
`usage`. Two formats, one fold: as server-sent events, and as lines of JSON whose position is the member `id`.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire import sse, turns
from headrace.api.wire.checks import INT64_MAX, Range, in_ranges, stops
from headrace.api.wire.ends import error_of
from headrace.api.wire.format import Parsed
from headrace.broker.errors import BadRequest, HeadraceError
from headrace.broker.messages import (
    Chat,
    Delta,
    Ended,
    Finished,
    Job,
    Message,
    Queued,
    ReadEntry,
    Sampling,
    Usage,
    View,
)
from headrace.broker.settings import ApiSettings

_NULL = msgspec.Raw(b"null")
_RANGES: tuple[Range, ...] = (
    ("max_tokens", 1, INT64_MAX),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, INT64_MAX),
    ("min_p", 0, 1),
    ("frequency_penalty", -2, 2),
    ("presence_penalty", -2, 2),
    ("seed", -INT64_MAX - 1, INT64_MAX),
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "seed")


class PlainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of this format, which is ours: an unknown one is an error. `model` None is the first one."""

    prompt: str | None = None
    messages: msgspec.Raw = msgspec.field(default_factory=lambda: _NULL)
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


_decoder = msgspec.json.Decoder(PlainRequest)


def envelope(error: HeadraceError) -> bytes:
    """An error, in place of the response or as the last object of a stream."""
    said = {"code": error.code, "message": error.message}
    return sse.encode({"error": {**said, "param": error.param} if error.param else said, "done": True})


class Plain(sse.SSEWire):
    """Server-sent events; see `format.Format`."""

    name: str = "plain"
    joins_text: bool = True

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        in_ranges(request, _RANGES)
        sampling = Sampling(**{name: getattr(request, name) for name in _SAMPLING})
        job = Job(
            "",
            request.model or "",
            _prompt(request, limits),
            max_tokens=request.max_tokens,
            stop=stops(request.stop, limits),
            sampling=sampling,
        )
        return Parsed(job, stream=request.stream is not False)

    def fold(self, job_id: str, view: View) -> PlainFold:
        return PlainFold(view)

    def whole(self, job_id: str, view: View) -> PlainWhole:
        return PlainWhole()

    def envelope(self, error: HeadraceError) -> bytes:
        return envelope(error)


class PlainLines(Plain):
    """Lines of JSON, which a WebSocket carries one a message."""

    name: str = "plain.ndjson"
    media_type: str = "application/x-ndjson"

    def frame(self, position: str, payload: bytes) -> bytes:
        if not position:
            return payload + b"\n"
        return b'{"id":"%b",%b\n' % (position.encode(), payload[1:])

    def heartbeat(self, note: str, view: View) -> bytes:
        """An object without text: a line may not be empty, and pings of the protocol do not reach a page's script."""
        return sse.encode({"token": "", "done": False, "note": note}) + b"\n"


def _prompt(request: PlainRequest, limits: ApiSettings) -> Chat:
    if bytes(request.messages) != b"null":
        if request.prompt is not None:
            raise BadRequest("Either prompt or messages, not both.", param="prompt")
        return turns.chat(request.messages, limits)
    if not request.prompt:
        raise BadRequest("prompt must be a text that is not empty, or messages a conversation.", param="prompt")
    return Chat([Message("user", request.prompt)])


class PlainFold:
    """A stream; see `format.Fold`. A choice's number is said only where there are several."""

    def __init__(self, view: View) -> None:
        self._has_choices = view.n > 1
        self._reason = "stop"

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Queued():
                    # it has the position that a client needs to come back, before there is any text
                    frames.append(b'{"token":"","done":false}')
                case Delta(text=text, reasoning=reasoning) if text or reasoning:
                    frames.append(self._step(event))
                case Finished():
                    self._reason = event.reason
                case Ended(status="done"):
                    last = {"token": "", "done": True, "finish_reason": self._reason, "usage": _usage(event.usage)}
                    frames.append(sse.encode(last))
                case Ended():
                    frames.append(envelope(error_of(event)))
        return frames

    def _step(self, event: Delta) -> bytes:
        said: dict[str, object] = {"token": event.text}
        if event.reasoning:
            said["reasoning"] = event.reasoning
        if self._has_choices:
            said["choice"] = event.choice
        return sse.encode({**said, "done": False})


class PlainWhole:
    """A response in one piece: what the objects of a stream say together; see `format.Whole`."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._reason = "stop"
        self._usage: Usage | None = None

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Delta():
                    self._texts.append(event.text)
                    self._reasoning.append(event.reasoning or "")
                case Finished():
                    self._reason = event.reason
                case Ended():
                    self._usage = event.usage

    def body(self) -> bytes:
        said: dict[str, object] = {"token": "".join(self._texts)}
        if reasoning := "".join(self._reasoning):
            said["reasoning"] = reasoning
        return sse.encode({**said, "done": True, "finish_reason": self._reason, "usage": _usage(self._usage)})


def _usage(usage: Usage | None) -> dict[str, int]:
    usage = usage or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
    }
