"""Tools on the way in: functions that the model may call, and which of them it must. Chat's shapes and Responses'."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from headrace.api.wire.bounds import MAX_TOOLS
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Tool, ToolChoice

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Function(Struct, frozen=True):
    """A function as chat says it; `strict` is not looked at: what the engine enforces, it enforces always."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(Struct, frozen=True):
    """One of chat's `tools`."""

    type: str
    function: Function | None = None


class FlatTool(Struct, frozen=True):
    """One of Responses' `tools`; those that are no function have other fields."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolName(Struct, frozen=True):
    """A function by its name."""

    name: str


class Choice(Struct, frozen=True):
    """`tool_choice` as an object: chat names the function inside of `function`, Responses beside the type."""

    type: str
    function: ToolName | None = None
    name: str | None = None


class ToolUse(NamedTuple):
    """What a request says about tools, as a job says it."""

    tools: list[Tool]
    choice: ToolChoice
    name: str | None


def of_chat(tools: Sequence[ChatTool], choice: str | Choice | None) -> ToolUse:
    """Read chat's `tools` and `tool_choice`; raises BadRequest."""
    flat = []
    for index, tool in enumerate(tools):
        if tool.type == "function" and tool.function is None:
            raise BadRequest(f"tools[{index}].function is missing.", param=f"tools[{index}].function")
        inner = tool.function or Function("")
        flat.append(FlatTool(tool.type, inner.name, inner.description, inner.parameters))
    named = choice.function.name if isinstance(choice, Choice) and choice.function else None
    return _read(flat, choice, named, ".function")


def of_responses(tools: Sequence[FlatTool], choice: str | Choice | None) -> ToolUse:
    """Read Responses' `tools` and `tool_choice`; raises BadRequest."""
    return _read(tools, choice, choice.name if isinstance(choice, Choice) else None, "")


def _read(tools: Sequence[FlatTool], choice: str | Choice | None, named: str | None, inside: str) -> ToolUse:
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"There must be at most {MAX_TOOLS} tools.", param="tools")
    read: list[Tool] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.type != "function":
            raise BadRequest("Only tools of the type function are supported by this server.", param=f"{where}.type")
        name, where = tool.name or "", f"{where}{inside}.name"
        if _NAME.fullmatch(name) is None:
            raise BadRequest(f"{where} must be 1 to 128 letters, digits, or any of _ . : -", param=where)
        if any(name == other.name for other in read):
            raise BadRequest(f"{where} stands twice.", param=where)
        read.append(Tool(name, tool.description or "", tool.parameters or {}))
    return _choose(read, choice, named, inside)


def _choose(tools: list[Tool], choice: str | Choice | None, named: str | None, inside: str) -> ToolUse:
    match choice:
        case None | "auto":
            return ToolUse(tools, "auto", None)
        case "none" if not tools:
            return ToolUse(tools, "auto", None)
        case "none":
            return ToolUse(tools, "none", None)
        case "required" if tools:
            return ToolUse(tools, "required", None)
        case "required":
            raise BadRequest("tool_choice is required, but there are no tools.", param="tool_choice")
        case str():
            raise BadRequest("tool_choice must be none, auto, required or a function.", param="tool_choice")
    if choice.type != "function":
        raise BadRequest("Only functions can be chosen on this server.", param="tool_choice.type")
    if named is None or all(tool.name != named for tool in tools):
        raise BadRequest("tool_choice names no function of tools.", param=f"tool_choice{inside}.name")
    return ToolUse(tools, "required", named)
