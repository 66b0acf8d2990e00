"""The fold of chat and completions: one machine, two shapes.

A chunk's bytes are put together from prepared parts, because one is made for every token and reader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.api.wire import sse
from headrace.api.wire.openai import envelope
from headrace.broker.errors import Cancelled, EngineFailed, HeadraceError, from_failure
from headrace.broker.messages import Delta, Ended, Finished, Queued, ReadEntry, Started, TokenLogprob, Usage, View

LogprobsOf = Callable[[list[TokenLogprob]], object]
"""Makes the `logprobs` object of one choice's next tokens; may keep a state, such as the offset in the text."""


class Shape(NamedTuple):
    """Where the two formats differ. The byte strings are members of a chunk's choice object."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    opening: bytes
    """Begins each choice once the engine has accepted the prompt; empty for no such chunk."""
    text: tuple[bytes, bytes]
    """Around the JSON string of some text."""
    closing: bytes
    message: Callable[[str], dict[str, object]]
    """The members of a whole choice that hold its text."""
    logprobs: Callable[[], LogprobsOf]


class HeldLogprobs:
    """Log-probabilities of steps whose text is held back.

    They go out with the choice's next text or with its finish; the tokens of a stop string never do.
    """

    def __init__(self, choices: int) -> None:
        self._held: list[list[TokenLogprob]] = [[] for _ in range(choices)]

    def take(self, event: Delta | Finished) -> list[TokenLogprob]:
        """What goes out with this event."""
        held = self._held[event.choice]
        if isinstance(event, Delta):
            held += event.logprobs or []
            if not event.text:
                return []
        self._held[event.choice] = []
        return [] if isinstance(event, Finished) and event.stop is not None else held


class OpenAIFold:
    """A stream; see `format.Fold`."""

    def __init__(self, shape: Shape, job_id: str, view: View) -> None:
        self._shape = shape
        self._view = view
        self._id = shape.id_prefix + job_id
        self._end_of_chunk = b'}],"usage":null}' if view.include_usage else b"}]}"
        self._after_text = shape.text[1] + b',"logprobs":null,"finish_reason":null' + self._end_of_chunk
        self._held = HeldLogprobs(view.n) if view.logprobs else None
        self._logprobs = [shape.logprobs() for _ in range(view.n)]
        self._is_open = False
        self._begin(0)

    def _begin(self, enqueued_ms: int) -> None:
        head = {
            "id": self._id,
            "object": self._shape.chunk_object,
            "created": enqueued_ms // 1000,
            "model": self._view.model,
        }
        self._head = sse.encode(head)[:-1] + b',"choices":['
        self._choices = [self._head + b'{"index":%d,' % index for index in range(self._view.n)]
        self._before_text = [choice + self._shape.text[0] for choice in self._choices]

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Delta():
                    frames += self._add(event)
                case Queued():
                    self._begin(event.enqueued_ms)
                case Started():
                    frames += self._open()
                case Finished():
                    frames.append(self._finish(event))
                case Ended():
                    frames += self._end(event)
        return frames

    def _add(self, event: Delta) -> list[bytes]:
        logprobs = self._held.take(event) if self._held else []
        if not event.text:
            return []
        text = sse.encode(event.text)
        if logprobs:
            before, after = self._shape.text
            return [self._chunk(event.choice, before + text + after, logprobs)]
        return [self._before_text[event.choice] + text + self._after_text]

    def _open(self) -> list[bytes]:
        if self._is_open or not self._shape.opening:
            return []
        self._is_open = True
        return [self._chunk(index, self._shape.opening, []) for index in range(self._view.n)]

    def _finish(self, event: Finished) -> bytes:
        logprobs = self._held.take(event) if self._held else []
        return self._chunk(event.choice, self._shape.closing, logprobs, sse.encode(event.reason))

    def _end(self, event: Ended) -> list[bytes]:
        if event.status != "done":
            return [envelope(_error(event))]
        if not self._view.include_usage:
            return []
        return [self._head + b'],"usage":' + sse.encode(_usage(event.usage)) + b"}"]

    def _chunk(self, choice: int, members: bytes, logprobs: list[TokenLogprob], reason: bytes = b"null") -> bytes:
        shown = sse.encode(self._logprobs[choice](logprobs)) if logprobs else b"null"
        parts = (self._choices[choice], members, b',"logprobs":', shown, b',"finish_reason":', reason)
        return b"".join((*parts, self._end_of_chunk))


class OpenAIWhole:
    """A response in one piece; see `format.Whole`."""

    def __init__(self, shape: Shape, job_id: str, view: View) -> None:
        self._shape = shape
        self._view = view
        self._id = shape.id_prefix + job_id
        self._created = 0
        self._texts: list[list[str]] = [[] for _ in range(view.n)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(view.n)]
        self._held = HeldLogprobs(view.n)
        self._reasons: list[str | None] = [None] * view.n
        self._usage: Usage | None = None

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Queued():
                    self._created = event.enqueued_ms // 1000
                case Delta():
                    self._texts[event.choice].append(event.text)
                    self._logprobs[event.choice] += self._held.take(event)
                case Finished():
                    self._reasons[event.choice] = event.reason
                    self._logprobs[event.choice] += self._held.take(event)
                case Ended():
                    self._usage = event.usage

    def body(self) -> bytes:
        whole = {
            "id": self._id,
            "object": self._shape.whole_object,
            "created": self._created,
            "model": self._view.model,
            "choices": [self._choice(index) for index in range(self._view.n)],
            "usage": _usage(self._usage),
        }
        return sse.encode(whole)

    def _choice(self, index: int) -> dict[str, object]:
        tokens = self._logprobs[index] if self._view.logprobs else []
        return {
            "index": index,
            **self._shape.message("".join(self._texts[index])),
            "logprobs": self._shape.logprobs()(tokens) if tokens else None,
            "finish_reason": self._reasons[index],
        }


def _error(event: Ended) -> HeadraceError:
    if event.error is None:
        return Cancelled() if event.status == "cancelled" else EngineFailed()
    return from_failure(event.error.code, event.error.message, event.error.param)


def _usage(usage: Usage | None) -> dict[str, object]:
    usage = usage or Usage(0, 0)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def shown_logprob(logprob: float) -> float:
    """JSON has no minus infinity (and no NaN); OpenAI says -9999 for "never"."""
    return max(-9999.0, logprob)
