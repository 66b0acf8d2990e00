"""Chat's messages on the way in: turns of text, of calls, and of what the calls answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Message, ToolCall
from headrace.broker.settings import ApiSettings

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Part(Struct, frozen=True):
    """A piece of a message; text is the only type there is."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(Struct, frozen=True):
    """`arguments` is JSON text, as the model wrote it."""

    name: str
    arguments: str


class Call(Struct, frozen=True):
    """A call of an earlier turn."""

    id: str
    function: CalledFunction
    type: str = "function"


class Turn(Struct, frozen=True):
    """One message as the caller wrote it. Thoughts are `reasoning_content`, or `reasoning` as vLLM says now."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


def chat_of(
    turns: Sequence[Turn], should_continue: bool | None, should_prompt: bool | None, limits: ApiSettings
) -> Chat:
    """Read the messages; raises BadRequest with the place of what is wrong, as `messages[1].content[0].type`.

    A last turn of the assistant's is gone on with, unless `should_continue` (vLLM's `continue_final_message`) is false
    or `should_prompt` (its `add_generation_prompt`) is true.
    """
    if not 1 <= len(turns) <= limits.max_messages:
        raise BadRequest(f"There must be from 1 to {limits.max_messages} messages.", param="messages")
    names: dict[str, str] = {}
    messages = [_message(turn, f"messages[{index}]", names) for index, turn in enumerate(turns)]
    can_continue = messages[-1].role == "assistant" and not messages[-1].tool_calls
    if should_continue and not can_continue:
        raise BadRequest("The last message is none of the assistant's text.", param="continue_final_message")
    if should_continue and should_prompt:
        raise BadRequest("This contradicts continue_final_message.", param="add_generation_prompt")
    is_open = can_continue and should_continue is not False and not should_prompt
    if should_prompt is False and not is_open:
        raise BadRequest("Only an unfinished message of the assistant's goes without.", param="add_generation_prompt")
    return Chat(messages, is_open)


def _message(turn: Turn, where: str, names: dict[str, str]) -> Message:
    """One turn; `names` are the functions of the calls so far, by the calls' ids, so that an answer can say which."""
    if turn.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    _check_fields(turn, where)
    content = text_of(turn.content or "", f"{where}.content") or turn.refusal or ""
    if turn.role == "assistant":
        calls = _calls(turn.tool_calls or [], f"{where}.tool_calls")
        names.update((call.id, call.name) for call in calls)
        return Message("assistant", content, calls, reasoning=turn.reasoning_content or turn.reasoning or None)
    if turn.content is None:
        raise BadRequest(f"{where}.content is missing.", param=f"{where}.content")
    if turn.role == "tool":
        answered = turn.tool_call_id or ""
        return Message("tool", content, tool_call_id=answered, name=names.get(answered))
    return Message(ROLES[turn.role], content)


def _check_fields(turn: Turn, where: str) -> None:
    refused = ["function_call", "audio"]
    if turn.role != "assistant":
        refused += ["tool_calls", "refusal", "reasoning_content", "reasoning"]
    if turn.role != "tool":
        refused.append("tool_call_id")
    for name in refused:
        if getattr(turn, name):
            raise BadRequest(f"{where}.{name} is not supported here.", param=f"{where}.{name}")
    if turn.role == "tool" and not turn.tool_call_id:
        raise BadRequest(f"{where}.tool_call_id is missing.", param=f"{where}.tool_call_id")


def _calls(calls: Sequence[Call], where: str) -> list[ToolCall]:
    for index, call in enumerate(calls):
        if call.type != "function":
            raise BadRequest("Only calls of functions are supported.", param=f"{where}[{index}].type")
        if not call.id:
            raise BadRequest(f"{where}[{index}].id must not be empty.", param=f"{where}[{index}].id")
    return [ToolCall(call.id, call.function.name, call.function.arguments) for call in calls]


def text_of(content: str | Sequence[Part], where: str, types: Sequence[str] = ("text", "refusal")) -> str:
    """The text of a message's parts; raises BadRequest for parts of other types than these."""
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part.type not in types:
            raise BadRequest("Only text parts are supported by this server.", param=f"{where}[{index}].type")
        name = "refusal" if part.type == "refusal" else "text"
        text = getattr(part, name)
        if text is None:
            raise BadRequest(f"{where}[{index}].{name} is missing.", param=f"{where}[{index}].{name}")
        texts.append(text)
    return "".join(texts)
