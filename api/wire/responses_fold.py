"""The fold of OpenAI's Responses: an event's `sequence_number` is its place in the stream, so a function of the log.

The response in one piece is what the stream has come to, at any moment: the last events carry it too. Only the first
choice is told, since there is no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headrace.api.wire import sse
from headrace.api.wire.ends import error_of
from headrace.api.wire.openai import shown_error
from headrace.api.wire.openai_calls import call_id
from headrace.api.wire.openai_fold import HeldLogprobs, shown_tokens, thought_tokens
from headrace.api.wire.responses_items import CallItem, Event, Item, MessageItem, ReasoningItem
from headrace.broker.messages import Delta, Ended, Finished, Queued, ReadEntry, Started, ToolCallDelta, Usage, View

_SAID: dict[str, Any] = {"instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": None}
_SAID |= {"tool_choice": "auto", "tools": [], "top_p": None, "background": False, "store": False}
"""What a response object says of a request that began in another format."""


class ResponsesFold:
    """A stream; see `format.Fold`. `fields` is what workers call otherwise than the caller does."""

    def __init__(self, job_id: str, view: View, fields: Mapping[str, str]) -> None:
        self._job_id = job_id
        self._view = view
        self._fields = fields
        self._said: dict[str, Any] = view.options.get("response", _SAID)
        self._sequence = 0
        self._created_s = 0
        self._status = "queued" if self._said["background"] else "in_progress"
        self._reason = "stop"
        self._error: dict[str, Any] | None = None
        self._usage: Usage | None = None
        self._thought_tokens = 0
        self._items: list[Item] = []
        self._open: Item | None = None
        """The item that text goes on in; calls are open besides, for the engine may write several at a time."""
        self._calls: dict[int, CallItem] = {}
        self._held = HeldLogprobs(view.n) if view.logprobs else None
        self._is_summary = bool(self._said.get("reasoning", {}).get("summary"))
        self._is_started = False

    def feed(self, entry: ReadEntry) -> list[bytes]:
        frames: list[bytes] = []
        for event in entry.events:
            match event:
                case Delta(choice=0):
                    frames += self._add(event)
                case Queued():
                    self._created_s = event.enqueued_ms // 1000
                    frames += self._frames(self._begin())
                case Started():
                    frames += self._frames(self._start())
                case Finished(choice=0):
                    frames += self._frames(self._finish(event))
                case Ended():
                    frames += self._frames(self._end(event))
        return frames

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        is_cut = self._status == "incomplete"
        return {
            "id": f"resp_{self._job_id}",
            "object": "response",
            "created_at": self._created_s,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._view.model,
            "output": [item.shown() for item in self._items],
            "usage": _shown_usage(self._usage, self._thought_tokens),
            **self._said,
        }

    # -- what each event of the log makes ---------------------------------------------------------------------------

    def _begin(self) -> list[Event]:
        names = ["response.created", *(["response.queued"] if self._status == "queued" else [])]
        return [(name, {"response": self.response()}) for name in names]

    def _start(self) -> list[Event]:
        if self._is_started:
            return []
        self._is_started, self._status = True, "in_progress"
        return [("response.in_progress", {"response": self.response()})]

    def _add(self, event: Delta) -> list[bytes]:
        tokens = self._held.take(event) if self._held else []
        frames = self._add_parsed(event) if event.reasoning or event.tool_calls else []
        if not event.text:
            return frames
        message = self._open
        if not isinstance(message, MessageItem):
            message = MessageItem(self._job_id, len(self._items))
            frames += self._frames(self._switch(message))
        logprobs = shown_tokens(tokens) if tokens else []
        message.add(event.text, logprobs)
        head = b'{"type":"response.output_text.delta","sequence_number":%d' % self._sequence
        self._sequence += 1
        tail = b',"logprobs":' + sse.encode(logprobs) + b"}" if logprobs else b',"logprobs":[]}'
        frames.append(head + message.prefix + sse.encode(event.text) + tail)
        return frames

    def _add_parsed(self, event: Delta) -> list[bytes]:
        events: list[Event] = []
        if event.reasoning:
            self._thought_tokens += thought_tokens(event)
            thoughts = self._open
            if not isinstance(thoughts, ReasoningItem):
                thoughts = ReasoningItem(self._job_id, len(self._items), is_summary=self._is_summary)
                events += self._switch(thoughts)
            events.append(thoughts.add(event.reasoning))
        for call in event.tool_calls or ():
            events += self._call(call)
        return self._frames(events)

    def _call(self, call: ToolCallDelta) -> list[Event]:
        events: list[Event] = []
        if call.index not in self._calls:
            item = CallItem(self._job_id, len(self._items), call_id(call, self._job_id, 0), call.name)
            self._calls[call.index] = item
            events += [*self._switch(None), *item.begin()]
            self._items.append(item)
        if call.arguments:
            events.append(self._calls[call.index].add(call.arguments))
        return events

    def _switch(self, to: Item | None) -> list[Event]:
        """Close what is open, and go on in another item."""
        closing = self._open.end("completed") if self._open else []
        self._open = to
        if to is None:
            return closing
        self._items.append(to)
        return [*closing, *to.begin()]

    def _finish(self, event: Finished) -> list[Event]:
        """All that is open ends here. An answer without anything is a message without text."""
        if self._held:
            self._held.take(event)
        self._reason = event.reason
        events = [] if self._items else self._switch(MessageItem(self._job_id, 0))
        self._open = None
        status = "incomplete" if event.reason == "length" else "completed"
        for item in self._items:
            if item.status == "in_progress":
                events += item.end(status)
        return events

    def _end(self, event: Ended) -> list[Event]:
        self._usage = event.usage
        if event.status == "done":
            self._status = "incomplete" if self._reason == "length" else "completed"
            return [(f"response.{self._status}", {"response": self.response()})]
        error = error_of(event)
        self._status = event.status
        shown = shown_error(error, self._fields)
        self._error = {name: shown[name] for name in ("code", "message", "param")}
        for item in self._items:
            if item.status == "in_progress":
                item.status = "incomplete"
        return [("response.failed", {"response": self.response()})]

    def _frames(self, events: Iterable[Event]) -> list[bytes]:
        frames = []
        for kind, members in events:
            frames.append(sse.encode({"type": kind, "sequence_number": self._sequence, **members}))
            self._sequence += 1
        return frames


class ResponsesWhole:
    """A response in one piece, at any moment; see `format.Whole`."""

    def __init__(self, job_id: str, view: View, fields: Mapping[str, str]) -> None:
        self._fold = ResponsesFold(job_id, view, fields)

    def feed(self, entry: ReadEntry) -> None:
        self._fold.feed(entry)

    def body(self) -> bytes:
        return sse.encode(self._fold.response())


def _shown_usage(usage: Usage | None, thought: int) -> dict[str, Any] | None:
    if usage is None:
        return None
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
