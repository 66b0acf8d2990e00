"""The items of a response's output while they grow: each knows what it is now, and which events its growth makes.

An item stands at `index` in the output. Event names and members are those of
https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from typing import Any

from headrace.api.wire import sse

Event = tuple[str, dict[str, Any]]
"""An event's type and its members, without what every event has."""


class Item:
    """What all items share; `part` is the one part of those that have parts."""

    def __init__(self, prefix: str, job_id: str, index: int) -> None:
        self.id = f"{prefix}_{job_id}_{index}"
        self.index = index
        self.status = "in_progress"
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def shown(self) -> dict[str, Any]:
        """The item as it is now."""
        raise NotImplementedError

    def begin(self) -> list[Event]:
        """The events that come before its first text."""
        return [("response.output_item.added", {"output_index": self.index, "item": self.shown()})]

    def end(self, status: str) -> list[Event]:
        """The events that come after its last text."""
        events = self._end()
        self.status = status
        return [*events, ("response.output_item.done", {"output_index": self.index, "item": self.shown()})]

    def _end(self) -> list[Event]:
        raise NotImplementedError


class MessageItem(Item):
    """Text that answers; `prefix` and `suffix` are the prepared bytes of its delta events, for around the text."""

    def __init__(self, job_id: str, index: int) -> None:
        super().__init__("msg", job_id, index)
        self.logprobs: list[dict[str, Any]] = []
        self._has_part = False
        self.prefix = b',"item_id":' + sse.encode(self.id) + b',"output_index":%d,"content_index":0,"delta":' % index

    def add(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._parts.append(text)
        self.logprobs += logprobs

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}

    def shown(self) -> dict[str, Any]:
        content = [self.part()] if self._has_part else []
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def begin(self) -> list[Event]:
        events = super().begin()
        self._has_part = True
        return [*events, ("response.content_part.added", {**self.place, "content_index": 0, "part": self.part()})]

    def _end(self) -> list[Event]:
        place = {**self.place, "content_index": 0}
        return [
            ("response.output_text.done", {**place, "text": self.text, "logprobs": self.logprobs}),
            ("response.content_part.done", {**place, "part": self.part()}),
        ]


class ReasoningItem(Item):
    """Thoughts, as content; or as a summary, if one was asked for."""

    def __init__(self, job_id: str, index: int, *, is_summary: bool) -> None:
        super().__init__("rs", job_id, index)
        self._is_summary = is_summary
        self._has_part = False
        self._kind = "summary_text" if is_summary else "reasoning_text"
        self._part_event = "response.reasoning_summary_part" if is_summary else "response.content_part"
        self._text_event = "response.reasoning_summary_text" if is_summary else "response.reasoning_text"
        self._at = {**self.place, "summary_index" if is_summary else "content_index": 0}

    def part(self) -> dict[str, Any]:
        return {"type": self._kind, "text": self.text}

    def shown(self) -> dict[str, Any]:
        parts = [self.part()] if self._has_part else []
        shown = {"id": self.id, "type": "reasoning", "status": self.status}
        return {**shown, "summary": parts if self._is_summary else [], "content": [] if self._is_summary else parts}

    def begin(self) -> list[Event]:
        events = super().begin()
        self._has_part = True
        return [*events, (f"{self._part_event}.added", {**self._at, "part": self.part()})]

    def add(self, text: str) -> Event:
        self._parts.append(text)
        return f"{self._text_event}.delta", {**self._at, "delta": text}

    def _end(self) -> list[Event]:
        return [
            (f"{self._text_event}.done", {**self._at, "text": self.text}),
            (f"{self._part_event}.done", {**self._at, "part": self.part()}),
        ]


class CallItem(Item):
    """A call of a function."""

    def __init__(self, job_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__("fc", job_id, index)
        self._call = {"call_id": call_id, "name": name}

    def shown(self) -> dict[str, Any]:
        shown = {"id": self.id, "type": "function_call", "status": self.status}
        return {**shown, **self._call, "arguments": self.text}

    def add(self, text: str) -> Event:
        self._parts.append(text)
        return "response.function_call_arguments.delta", {**self.place, "delta": text}

    def _end(self) -> list[Event]:
        said = {"name": self._call["name"], "arguments": self.text}
        return [("response.function_call_arguments.done", {**self.place, **said})]
