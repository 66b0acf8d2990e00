"""The fold of chat and completions: one machine, two shapes.

A chunk's bytes are put together from prepared parts, because one is made for every token and reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.api.wire import sse
from headrace.api.wire.ends import error_of
from headrace.api.wire.openai_calls import Calls
from headrace.broker.errors import HeadraceError
from headrace.broker.messages import (
    Alternative,
    Delta,
    Ended,
    Finished,
    Queued,
    ReadEntry,
    Started,
    TokenLogprob,
    ToolCall,
    Usage,
    View,
)

LogprobsOf = Callable[[list[TokenLogprob]], object]
"""Makes the `logprobs` object of one choice's next tokens; may keep a state, such as the offset in the text."""


class Answer(NamedTuple):
    """All that one choice says."""

    text: str
    reasoning: str
    calls: list[ToolCall]


class Shape(NamedTuple):
    """Where the two formats differ. The byte strings are members of a chunk's choice object."""

    id_prefix: str
    chunk_object: str
    whole_object: str
    opening: Callable[[View], bytes]
    """Begins each choice once the engine has accepted the prompt; empty for no such chunk."""
    text: tuple[bytes, bytes]
    """Around the JSON string of some text."""
    parsed: Callable[[Delta, str], bytes]
    """The members for a delta with thoughts or calls, of a job; empty if the format shows nothing of it."""
    closing: bytes
    reasons: Mapping[str, str]
    """Finish reasons that this format says otherwise."""
    prefix: Callable[[View], str]
    """Text that a whole choice begins with, as `opening` does in a stream."""
    message: Callable[[Answer], dict[str, object]]
    """The members of a whole choice that hold what was answered."""
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
            if not (event.text or event.reasoning or event.tool_calls):
                return []
        self._held[event.choice] = []
        return [] if isinstance(event, Finished) and event.stop is not None else held


class OpenAIFold:
    """A stream; see `format.Fold`. `say` makes a frame of an error."""

    def __init__(self, shape: Shape, job_id: str, view: View, say: Callable[[HeadraceError], bytes]) -> None:
        self._shape = shape
        self._view = view
        self._say = say
        self._job_id = job_id
        self._id = shape.id_prefix + job_id
        self._end_of_chunk = b'}],"usage":null}' if view.include_usage else b"}]}"
        self._after_text = shape.text[1] + b',"logprobs":null,"finish_reason":null' + self._end_of_chunk
        self._is_plain = not view.logprobs
        self._held = HeldLogprobs(view.n) if view.logprobs else None
        self._logprobs = [shape.logprobs() for _ in range(view.n)]
        self._thought_tokens = 0
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
                case Delta() if self._is_plain and event.reasoning is None and event.tool_calls is None:
                    if event.text:  # the hot path: one frame for every token and reader
                        frames.append(self._before_text[event.choice] + sse.encode(event.text) + self._after_text)
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
        if event.reasoning or event.tool_calls:
            return self._add_parsed(event, logprobs)
        if not event.text:
            return []
        before, after = self._shape.text
        return [self._chunk(event.choice, before + sse.encode(event.text) + after, logprobs)]

    def _add_parsed(self, event: Delta, logprobs: list[TokenLogprob]) -> list[bytes]:
        self._thought_tokens += thought_tokens(event)
        members = self._shape.parsed(event, self._job_id)
        return [self._chunk(event.choice, members, logprobs)] if members else []

    def _open(self) -> list[bytes]:
        opening = b"" if self._is_open else self._shape.opening(self._view)
        if not opening:
            return []
        self._is_open = True
        return [self._chunk(index, opening, []) for index in range(self._view.n)]

    def _finish(self, event: Finished) -> bytes:
        logprobs = self._held.take(event) if self._held else []
        reason = self._shape.reasons.get(event.reason, event.reason)
        return self._chunk(event.choice, self._shape.closing, logprobs, sse.encode(reason))

    def _end(self, event: Ended) -> list[bytes]:
        if event.status != "done":
            return [self._say(error_of(event))]
        if not self._view.include_usage:
            return []
        return [self._head + b'],"usage":' + sse.encode(_usage(event.usage, self._thought_tokens)) + b"}"]

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
        self._texts: list[list[str]] = [[shape.prefix(view)] for _ in range(view.n)]
        self._thoughts: list[list[str]] = [[] for _ in range(view.n)]
        self._thought_tokens = 0
        self._calls = [Calls(job_id, index) for index in range(view.n)]
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
                    self._add(event)
                case Finished():
                    self._reasons[event.choice] = event.reason
                    self._logprobs[event.choice] += self._held.take(event)
                case Ended():
                    self._usage = event.usage

    def _add(self, event: Delta) -> None:
        self._texts[event.choice].append(event.text)
        self._logprobs[event.choice] += self._held.take(event)
        if event.reasoning:
            self._thoughts[event.choice].append(event.reasoning)
            self._thought_tokens += thought_tokens(event)
        if event.tool_calls:
            self._calls[event.choice].add(event.tool_calls)

    def body(self) -> bytes:
        whole = {
            "id": self._id,
            "object": self._shape.whole_object,
            "created": self._created,
            "model": self._view.model,
            "choices": [self._choice(index) for index in range(self._view.n)],
            "usage": _usage(self._usage, self._thought_tokens),
        }
        return sse.encode(whole)

    def _choice(self, index: int) -> dict[str, object]:
        tokens = self._logprobs[index] if self._view.logprobs else []
        answer = Answer("".join(self._texts[index]), "".join(self._thoughts[index]), self._calls[index].whole())
        reason = self._reasons[index]
        return {
            "index": index,
            **self._shape.message(answer),
            "logprobs": self._shape.logprobs()(tokens) if tokens else None,
            "finish_reason": reason and self._shape.reasons.get(reason, reason),
        }


def thought_tokens(event: Delta) -> int:
    """How many tokens of a step are thoughts; a step that both thinks and answers counts as the answer's."""
    return len(event.token_ids) if event.reasoning and not event.text else 0


def _usage(usage: Usage | None, thought: int) -> dict[str, object]:
    usage = usage or Usage(0, 0)
    details = {"completion_tokens_details": {"reasoning_tokens": thought}} if thought else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **details,
    }


def shown_logprob(logprob: float) -> float:
    """JSON has no minus infinity (and no NaN); OpenAI says -9999 for "never"."""
    return max(-9999.0, logprob)


def shown_tokens(tokens: list[TokenLogprob]) -> list[dict[str, object]]:
    """Tokens with their log-probabilities and alternatives, as chat and Responses show them."""
    return [{**_shown(token), "top_logprobs": [_shown(other) for other in token.top]} for token in tokens]


def _shown(token: TokenLogprob | Alternative) -> dict[str, object]:
    piece = token.piece.decode(errors="replace")
    return {"token": piece, "logprob": shown_logprob(token.logprob), "bytes": list(token.piece)}
