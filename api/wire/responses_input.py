"""The `input` of a response: a string, or items, made into the turns of a conversation; and turns shown as items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from headrace.api.wire.openai_messages import ROLES, Part, text_of
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Message, ToolCall
from headrace.broker.settings import ApiSettings

_TEXTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")
"""The types of parts that are text, whoever wrote it."""


class Item(Struct, frozen=True):
    """One item of any type, as the caller wrote it; what has no type is a message."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class _Assistant(Struct):
    """A turn of the assistant's while its items are read: thoughts, then text, then calls, each of which may lack."""

    thoughts: list[str] = []
    content: str | None = None
    calls: list[ToolCall] = []

    def message(self) -> Message:
        return Message("assistant", self.content or "", self.calls, reasoning="".join(self.thoughts) or None)


class _Reading:
    """A pass over the items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._turn: _Assistant | None = None
        self._names: dict[str, str] = {}

    def add(self, item: Item, where: str) -> None:
        match item.type:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._own(is_new=self._turn is not None and (self._turn.content is not None or bool(self._turn.calls)))
                thoughts = item.content or item.summary or []
                self._turn_of().thoughts.append(text_of(thoughts, f"{where}.content", _TEXTS))
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._answer(item, where)
            case _:
                raise BadRequest("Items of this type are not supported by this server.", param=f"{where}.type")

    def _message(self, item: Item, where: str) -> None:
        role = ROLES.get(item.role or "", "tool")
        if role == "tool":
            known = ", ".join(name for name in ROLES if name != "tool")
            raise BadRequest(f"{where}.role must be one of {known}.", param=f"{where}.role")
        if item.content is None:
            raise BadRequest(f"{where}.content is missing.", param=f"{where}.content")
        text = text_of(item.content, f"{where}.content", _TEXTS)
        if role != "assistant":
            self.close()
            self.messages.append(Message(role, text))
            return
        self._own(is_new=self._turn is not None and (self._turn.content is not None or bool(self._turn.calls)))
        self._turn_of().content = text

    def _call(self, item: Item, where: str) -> None:
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None or (name != "arguments" and not getattr(item, name)):
                raise BadRequest(f"{where}.{name} is missing.", param=f"{where}.{name}")
        call = ToolCall(item.call_id or "", item.name or "", item.arguments or "")
        self._names[call.id] = call.name
        self._turn_of().calls.append(call)

    def _answer(self, item: Item, where: str) -> None:
        if not item.call_id:
            raise BadRequest(f"{where}.call_id is missing.", param=f"{where}.call_id")
        if item.output is None:
            raise BadRequest(f"{where}.output is missing.", param=f"{where}.output")
        self.close()
        text = text_of(item.output, f"{where}.output", _TEXTS)
        self.messages.append(Message("tool", text, tool_call_id=item.call_id, name=self._names.get(item.call_id)))

    def _own(self, *, is_new: bool) -> None:
        if is_new:
            self.close()

    def _turn_of(self) -> _Assistant:
        if self._turn is None:
            self._turn = _Assistant()
        return self._turn

    def close(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._turn = None


def messages_of(given: str | Sequence[Item], limits: ApiSettings) -> list[Message]:
    """The turns that an input makes; raises BadRequest with the place of what is wrong, as `input[2].call_id`."""
    if isinstance(given, str):
        return [Message("user", given)]
    if not 1 <= len(given) <= limits.max_messages:
        raise BadRequest(f"There must be from 1 to {limits.max_messages} items.", param="input")
    reading = _Reading()
    for index, item in enumerate(given):
        reading.add(item, f"input[{index}]")
    reading.close()
    return reading.messages


def items_of(messages: Sequence[Message], job_id: str) -> list[dict[str, Any]]:
    """Turns as the items they could have come from, with ids that are the same each time."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **members: Any) -> None:
        items.append({"id": f"{prefix}_{job_id}_in{len(items)}", "type": kind, "status": "completed", **members})

    for message in messages:
        if message.role == "tool":
            add("fco", "function_call_output", call_id=message.tool_call_id, output=message.content)
            continue
        if message.reasoning:
            add("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": message.reasoning}])
        if message.content or not message.tool_calls:
            kind = "output_text" if message.role == "assistant" else "input_text"
            part = {"type": kind, "text": message.content, **({"annotations": []} if kind == "output_text" else {})}
            add("msg", "message", role=message.role, content=[part])
        for call in message.tool_calls:
            add("fc", "function_call", call_id=call.id, name=call.name, arguments=call.arguments)
    return items
