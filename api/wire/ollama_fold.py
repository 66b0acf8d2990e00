"""The fold of Ollama's chat and generate: one machine, two shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.api.wire import sse
from headrace.api.wire.ends import error_of
from headrace.api.wire.ollama import Say, metrics, now, stamp
from headrace.api.wire.openai_fold import shown_logprob
from headrace.broker.messages import (
    Alternative,
    Delta,
    Ended,
    Finished,
    Queued,
    ReadEntry,
    TokenLogprob,
    ToolCallDelta,
    View,
)


class Shape(NamedTuple):
    """Where the two formats differ: `said` are the members that hold what the model says."""

    said: Callable[[Mapping[str, object]], dict[str, object]]
    text: tuple[bytes, bytes]
    """Around the JSON string of some text, the same members."""


class Calls:
    """Tool calls, put together: Ollama says a call at once, with its arguments as an object."""

    def __init__(self) -> None:
        self._heads: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, list[str]] = {}

    def add(self, delta: Delta) -> None:
        for call in delta.tool_calls or ():
            self._heads.setdefault(call.index, call)
            self._arguments.setdefault(call.index, []).append(call.arguments)

    def said(self) -> list[dict[str, object]]:
        """Those that are complete; one that was cut off in its middle must not be called."""
        shown: list[dict[str, object]] = []
        for index, head in self._heads.items():
            arguments = _object("".join(self._arguments[index]))
            if arguments is not None:
                function = {"index": index, "name": head.name, "arguments": arguments}
                shown.append({"id": head.id, "function": function})
        return shown


class HeldLogprobs:
    """Log-probabilities of steps that say nothing yet: they go out with what is said next, or at the end.

    Those of a stop string never do.
    """

    def __init__(self) -> None:
        self._held: list[TokenLogprob] = []

    def take(self, event: Delta | Finished) -> list[TokenLogprob]:
        """What goes out with this event."""
        if isinstance(event, Delta):
            self._held += event.logprobs or []
            if not event.text and not event.reasoning:
                return []
        held, self._held = self._held, []
        return [] if isinstance(event, Finished) and event.stop is not None else held


class OllamaFold:
    """A stream; see `format.Fold`. Times are the log's own, so that they are the same for every reader."""

    def __init__(self, shape: Shape, view: View, say: Say) -> None:
        self._shape = shape
        self._view = view
        self._say = say
        self._model = b'{"model":%b,"created_at":"' % sse.encode(model_of(view))
        self._enqueued_ms = 0
        self._held = HeldLogprobs() if view.logprobs else None
        self._calls = Calls()
        self._last_logprobs: list[TokenLogprob] = []
        self._finish = Finished(0, "stop")

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Delta():
                    frames += self._add(event, entry.at_ms)
                case Queued():
                    self._enqueued_ms = event.enqueued_ms
                case Finished():
                    frames += self._close(event, entry.at_ms)
                case Ended(status="done"):
                    frames.append(self._end(event, entry.at_ms))
                case Ended():
                    frames.append(self._say(error_of(event)))
        return frames

    def _add(self, event: Delta, at_ms: int) -> list[bytes]:
        self._calls.add(event)
        logprobs = [_shown(token) for token in self._held.take(event)] if self._held else []
        frames = []
        if event.reasoning:
            frames.append(self._chunk(at_ms, {"content": "", "thinking": event.reasoning}, logprobs))
            logprobs = []
        if event.text and logprobs:
            frames.append(self._chunk(at_ms, {"content": event.text}, logprobs))
        elif event.text:
            before, after = self._shape.text
            head = b"%b%b" % (self._model, stamp(self._enqueued_ms + at_ms).encode())
            frames.append(b'%b",%b%b%b,"done":false}' % (head, before, sse.encode(event.text), after))
        return frames

    def _close(self, event: Finished, at_ms: int) -> list[bytes]:
        self._finish = event
        self._last_logprobs += self._held.take(event) if self._held else []
        calls = self._calls.said()
        return [self._chunk(at_ms, {"content": "", "tool_calls": calls}, [])] if calls else []

    def _chunk(self, at_ms: int, content: Mapping[str, object], logprobs: list[dict[str, object]]) -> bytes:
        head = {"model": model_of(self._view), "created_at": stamp(self._enqueued_ms + at_ms)}
        more = {"logprobs": logprobs} if logprobs else {}
        return sse.encode({**head, **self._shape.said(content), **more, "done": False})

    def _end(self, event: Ended, at_ms: int) -> bytes:
        said = self._shape.said({"content": ""})
        shown = [_shown(token) for token in self._last_logprobs]
        return _last(self._view, self._enqueued_ms + at_ms, said, self._finish, shown, _metrics(event, at_ms))


class OllamaWhole:
    """A response in one piece; see `format.Whole`."""

    def __init__(self, shape: Shape, view: View) -> None:
        self._shape = shape
        self._view = view
        self._enqueued_ms = 0
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls = Calls()
        self._held = HeldLogprobs()
        self._logprobs: list[TokenLogprob] = []
        self._finish = Finished(0, "stop")
        self._end: tuple[Ended, int] = (Ended("done"), 0)

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Queued():
                    self._enqueued_ms = event.enqueued_ms
                case Delta():
                    self._texts.append(event.text)
                    self._thoughts.append(event.reasoning or "")
                    self._calls.add(event)
                    self._logprobs += self._held.take(event)
                case Finished():
                    self._finish = event
                    self._logprobs += self._held.take(event)
                case Ended():
                    self._end = (event, entry.at_ms)

    def body(self) -> bytes:
        content = {"content": "".join(self._texts), "thinking": "".join(self._thoughts)}
        said = self._shape.said({**content, "tool_calls": self._calls.said()})
        shown = [_shown(token) for token in self._logprobs] if self._view.logprobs else []
        event, at_ms = self._end
        return _last(self._view, self._enqueued_ms + at_ms, said, self._finish, shown, _metrics(event, at_ms))


def heartbeat(shape: Shape, view: View) -> bytes:
    """A chunk in which nothing is said: clients know no other line."""
    return sse.encode({"model": model_of(view), "created_at": now(), **shape.said({"content": ""}), "done": False})


def loaded(shape: Shape, model: str, reason: str) -> bytes:
    """The answer to a request without a prompt."""
    said = shape.said({"content": ""})
    return sse.encode({"model": model, "created_at": now(), **said, "done": True, "done_reason": reason})


def model_of(view: View) -> str:
    """The name that the caller used, with its tag or without."""
    return str(view.options.get("asked", view.model))


def _last(
    view: View,
    ms: int,
    said: Mapping[str, object],
    finish: Finished,
    logprobs: list[dict[str, object]],
    measured: Mapping[str, int],
) -> bytes:
    """The object with `done`; to Ollama a turn that ended in tool calls has simply stopped."""
    reason = "length" if finish.reason == "length" else "stop"
    more = {"logprobs": logprobs} if logprobs else {}
    head = {"model": model_of(view), "created_at": stamp(ms)}
    return sse.encode({**head, **said, **more, "done": True, "done_reason": reason, **measured})


def _metrics(event: Ended, at_ms: int) -> dict[str, int]:
    return metrics(event.usage, event.timings, at_ms)


def _object(arguments: str) -> dict[str, Any] | None:
    try:
        read = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return None
    return read if isinstance(read, dict) else None


def _shown(token: TokenLogprob) -> dict[str, object]:
    return {**_shown_token(token), "top_logprobs": [_shown_token(other) for other in token.top]}


def _shown_token(token: TokenLogprob | Alternative) -> dict[str, object]:
    piece = token.piece.decode(errors="replace")
    return {"token": piece, "logprob": shown_logprob(token.logprob), "bytes": list(token.piece)}


def said_members(content: Mapping[str, object]) -> dict[str, object]:
    """Without what is empty, save the content."""
    return {name: value for name, value in content.items() if value or name == "content"}
