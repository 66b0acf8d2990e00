"""`POST /api/chat`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama import Load, OllamaWire
from headrace.api.wire.ollama_fold import OllamaFold, OllamaWhole, Shape, heartbeat, loaded, said_members
from headrace.api.wire.ollama_request import Request, is_load, parsed
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Message, Tool, ToolCall, View
from headrace.broker.settings import ApiSettings

ROLES = ("system", "user", "assistant", "tool")


class Function(Struct, frozen=True):
    """What a call calls, and with what."""

    name: str
    arguments: dict[str, Any] = {}


class Call(Struct, frozen=True):
    """A tool call of an earlier turn."""

    function: Function
    id: str | None = None


class Turn(Struct, frozen=True):
    """One message as the caller wrote it."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class FunctionParam(Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolParam(Struct, frozen=True):
    """A tool; functions are the only type there is."""

    function: FunctionParam
    type: str | None = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """The fields of this route."""

    messages: list[Turn] | None = None
    tools: list[ToolParam] | None = None


_decoder = msgspec.json.Decoder(ChatRequest)


class OllamaChat(OllamaWire):
    """Ollama's chat; see `format.Format`."""

    name: str = "ollama.chat"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        """Raises also `Load`, for a request without messages."""
        request = decode(_decoder, body, limits)
        if not request.messages:
            reason = "load" if is_load(request) else "unload"
            raise Load(request.model, loaded(SHAPE, request.model, reason))
        tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])]
        return parsed(request, _prompt(request.messages, limits), limits, tools=tools)

    def fold(self, job_id: str, view: View) -> OllamaFold:
        return OllamaFold(SHAPE, view, self.error_frame)

    def whole(self, job_id: str, view: View) -> OllamaWhole:
        return OllamaWhole(SHAPE, view)

    def heartbeat(self, note: str, view: View) -> bytes:
        return heartbeat(SHAPE, view) + b"\n"


def _prompt(turns: list[Turn], limits: ApiSettings) -> Chat:
    """The conversation; an assistant's turn at the end is the beginning of the answer."""
    if len(turns) > limits.max_messages:
        raise BadRequest(f"messages must have at most {limits.max_messages} messages.", param="messages")
    waiting = _Waiting()
    messages = []
    for index, turn in enumerate(turns):
        message = _message(turn, index, waiting)
        waiting.add(message.tool_calls)
        messages.append(message)
    last = messages[-1]
    return Chat(messages, is_open=last.role == "assistant" and not last.tool_calls)


def _message(turn: Turn, number: int, waiting: _Waiting) -> Message:
    where = f"messages[{number}]"
    if turn.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    if turn.images:
        raise BadRequest(f"{where}.images are not supported here.", param=f"{where}.images")
    if turn.tool_calls and turn.role != "assistant":
        raise BadRequest(f"{where}.tool_calls can only be the assistant's.", param=f"{where}.tool_calls")
    content = turn.content or ""
    if turn.role == "tool":
        call = waiting.answered(turn)
        return Message("tool", content, tool_call_id=call.id or None, name=call.name or None)
    calls = [
        ToolCall(
            call.id or f"call_{number}_{index}",
            call.function.name,
            msgspec.json.encode(call.function.arguments).decode(),
        )
        for index, call in enumerate(turn.tool_calls or [])
    ]
    return Message(turn.role, content, calls, reasoning=turn.thinking or None)


class _Waiting:
    """Calls without a result yet, in their order; found by id and by name without a look at the others."""

    def __init__(self) -> None:
        self._calls: dict[int, ToolCall] = {}
        self._by_id: dict[str, deque[int]] = {}
        self._by_name: dict[str, deque[int]] = {}
        self._count = 0

    def add(self, calls: Iterable[ToolCall]) -> None:
        for call in calls:
            self._count += 1
            self._calls[self._count] = call
            self._by_id.setdefault(call.id, deque()).append(self._count)
            self._by_name.setdefault(call.name, deque()).append(self._count)

    def answered(self, turn: Turn) -> ToolCall:
        """Which call a result is of: that of its id, else the first that waits (of its name, if it says one)."""
        numbers: Iterable[int]
        if turn.tool_call_id:
            numbers = self._by_id.get(turn.tool_call_id, ())
        else:
            numbers = self._by_name.get(turn.tool_name, ()) if turn.tool_name else self._calls
        found = next((number for number in numbers if number in self._calls), None)
        if found is None:
            return ToolCall(turn.tool_call_id or "", turn.tool_name or "", "")
        return self._take(found)

    def _take(self, number: int) -> ToolCall:
        call = self._calls.pop(number)
        for numbers in (self._by_id[call.id], self._by_name[call.name]):
            while numbers and numbers[0] not in self._calls:
                numbers.popleft()
        return call


def _tool(tool: ToolParam, where: str) -> Tool:
    if tool.type not in (None, "function"):
        raise BadRequest(f"{where}.type must be function.", param=f"{where}.type")
    if not tool.function.name:
        raise BadRequest(f"{where}.function.name must not be empty.", param=f"{where}.function.name")
    return Tool(tool.function.name, tool.function.description or "", tool.function.parameters or {})


def _said(content: Mapping[str, object]) -> dict[str, object]:
    return {"message": {"role": "assistant", **said_members(content)}}


SHAPE = Shape(said=_said, text=(b'"message":{"role":"assistant","content":', b"}"))
