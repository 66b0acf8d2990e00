"""The fold of Anthropic's Messages: what a model says as numbered blocks, one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace.api.wire import sse
from headrace.api.wire.anthropic import envelope_of
from headrace.api.wire.ends import error_of
from headrace.broker.messages import Delta, Ended, Finished, ReadEntry, Started, ToolCallDelta, Usage, View

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Piece(NamedTuple):
    """Some text of one kind (`text`, `thinking`, or the JSON of a `tool_use`) and the number of the block it is of."""

    block: int
    kind: str
    text: str
    call: ToolCallDelta | None = None
    """What begins a tool call."""


class Blocks:
    """Which block a piece of the answer stands in: the open one if that is of its kind, else a new one.

    A call keeps its block, also for what comes after the next one has begun.
    """

    def __init__(self) -> None:
        self.count = 0
        self.open: str | None = None
        self._of_call: dict[int, int] = {}

    def place(self, delta: Delta) -> list[Piece]:
        placed = []
        if delta.reasoning:
            placed.append(self._place("thinking", delta.reasoning))
        if delta.text:
            placed.append(self._place("text", delta.text))
        return placed + [self._place_call(call) for call in delta.tool_calls or ()]

    def _place(self, kind: str, text: str) -> Piece:
        if self.open != kind:
            self.open = kind
            self.count += 1
        return Piece(self.count - 1, kind, text)

    def _place_call(self, call: ToolCallDelta) -> Piece:
        if call.index in self._of_call:
            return Piece(self._of_call[call.index], "tool_use", call.arguments)
        self.open = "tool_use"
        self._of_call[call.index] = self.count
        self.count += 1
        return Piece(self.count - 1, "tool_use", call.arguments, call)


class MessagesFold:
    """A stream; see `format.Fold`. The last frames need the usage, so they come with the end."""

    def __init__(self, job_id: str, view: View) -> None:
        self._job_id = job_id
        self._view = view
        self._blocks = Blocks()
        self._begun = 0
        self._open: Piece | None = None
        self._is_started = False
        self._finish = Finished(0, "stop")

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Delta():
                    for piece in self._blocks.place(event):
                        frames += self._add(piece)
                case Started():
                    frames += self._start(event)
                case Finished():
                    self._finish = event
                    frames += self._close()
                case Ended(status="done"):
                    frames += self._end(event)
                case Ended():
                    frames.append(envelope_of(self._job_id, error_of(event)))
        return frames

    def _start(self, event: Started) -> list[bytes]:
        """Once: a later attempt goes on with the same message."""
        if self._is_started:
            return []
        self._is_started = True
        message = _message(self._job_id, self._view, [], Usage(event.prompt_tokens, 0, event.cached_tokens))
        return [sse.encode({"type": "message_start", "message": message})]

    def _add(self, piece: Piece) -> list[bytes]:
        frames: list[bytes] = []
        if piece.block == self._begun:
            frames += self._close()
            self._begun += 1
            self._open = piece
            begin = {"type": "content_block_start", "index": piece.block, "content_block": _empty(piece)}
            frames.append(sse.encode(begin))
        if not piece.text or (piece.kind == "thinking" and "omit_thinking" in self._view.options):
            return frames
        kind, name = _DELTAS[piece.kind]
        text = sse.encode(piece.text)
        frames.append(
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}' % (piece.block, kind, name, text)
        )
        return frames

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        piece, self._open = self._open, None
        stop = sse.encode({"type": "content_block_stop", "index": piece.block})
        if piece.kind != "thinking":
            return [stop]
        delta = {"type": "signature_delta", "signature": self._job_id}
        return [sse.encode({"type": "content_block_delta", "index": piece.block, "delta": delta}), stop]

    def _end(self, event: Ended) -> list[bytes]:
        delta = {"type": "message_delta", "delta": _stopped(self._finish), "usage": _usage(event.usage)}
        return [*self._close(), sse.encode(delta), b'{"type":"message_stop"}']


class MessagesWhole:
    """A response in one piece; see `format.Whole`."""

    def __init__(self, job_id: str, view: View) -> None:
        self._job_id = job_id
        self._view = view
        self._blocks = Blocks()
        self._first: list[Piece] = []
        self._texts: list[list[str]] = []
        self._finish = Finished(0, "stop")
        self._usage: Usage | None = None

    def feed(self, entry: ReadEntry) -> None:
        for event in entry.events:
            match event:
                case Delta():
                    self._add(event)
                case Finished():
                    self._finish = event
                case Ended():
                    self._usage = event.usage

    def _add(self, event: Delta) -> None:
        for piece in self._blocks.place(event):
            if piece.block == len(self._first):
                self._first.append(piece)
                self._texts.append([])
            self._texts[piece.block].append(piece.text)

    def body(self) -> bytes:
        content = [self._shown(*each) for each in zip(self._first, self._texts, strict=True)]
        return sse.encode(_message(self._job_id, self._view, content, self._usage, self._finish))

    def _shown(self, piece: Piece, texts: list[str]) -> dict[str, object]:
        text, shown = "".join(texts), _empty(piece)
        match piece.kind:
            case "text":
                return {**shown, "text": text}
            case "thinking":
                thinking = "" if "omit_thinking" in self._view.options else text
                return {**shown, "thinking": thinking, "signature": self._job_id}
        return {**shown, "input": _object(text)}


_DELTAS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
"""The type of what adds to a block, and its field."""


def _empty(piece: Piece) -> dict[str, object]:
    if piece.kind == "text":
        return {"type": "text", "text": ""}
    if piece.kind == "thinking":
        return {"type": "thinking", "thinking": "", "signature": ""}
    call = piece.call or ToolCallDelta(0)
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}


def _message(
    job_id: str, view: View, content: list[dict[str, object]], usage: Usage | None, finish: Finished | None = None
) -> dict[str, object]:
    return {
        "id": f"msg_{job_id}",
        "type": "message",
        "role": "assistant",
        "model": view.model,
        "content": content,
        **_stopped(finish),
        "usage": _usage(usage),
    }


def _stopped(finish: Finished | None) -> dict[str, object]:
    if finish is None:
        return {"stop_reason": None, "stop_sequence": None}
    if finish.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": finish.stop}
    return {"stop_reason": _STOP_REASONS.get(finish.reason, "end_turn"), "stop_sequence": None}


def _usage(usage: Usage | None) -> dict[str, object]:
    """Anthropic counts what came from the cache beside the input, not in it."""
    usage = usage or Usage(0, 0)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }


def _object(arguments: str) -> Any:
    """The input of a call. One that was cut off in its middle has none; its stop reason is `max_tokens`."""
    try:
        read = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return {}
    return read if isinstance(read, dict) else {}
