"""From Anthropic's turns, which hold blocks, to the conversation that a worker renders."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, structs

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Message, ToolCall
from headrace.broker.settings import ApiSettings

_BETWEEN_BLOCKS = "\n"
"""Blocks are pieces of their own; what stands in two of them is not one word."""


class Block(Struct, frozen=True):
    """A content block of any type that is known here; which fields it needs, its type says."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    thinking: str | None = None


class Turn(Struct, frozen=True):
    """One message as the caller wrote it."""

    role: str
    content: str | list[Block]


def prompt(system: str | list[Block] | None, turns: list[Turn], limits: ApiSettings) -> Chat:
    """The conversation; turns of one role that follow each other are one turn, as Anthropic has it.

    An assistant's turn at the end is the beginning of the answer. Raises BadRequest.
    """
    if not 1 <= len(turns) <= limits.max_messages:
        raise BadRequest(f"messages: there must be from 1 to {limits.max_messages} messages.", param="messages")
    reader = _Reader()
    if system:
        reader.add(Message("system", _text_of(system, "system")))
    for index, turn in enumerate(turns):
        reader.read(turn, f"messages[{index}]", is_last=index == len(turns) - 1)
    reader.close()
    last = reader.messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise BadRequest("messages: every tool_use needs a tool_result in the next message.", param="messages")
    return Chat(reader.messages, is_open=last.role == "assistant")


class _Reader:
    """Puts turns together; knows the calls so far, because a result names its call only by id."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._parts: list[Message] = []
        self._called: dict[str, str] = {}

    def read(self, turn: Turn, where: str, *, is_last: bool) -> None:
        blocks = [Block("text", turn.content)] if isinstance(turn.content, str) else turn.content
        match turn.role:
            case "user":
                self._read_user(blocks, f"{where}.content")
            case "assistant":
                self._read_assistant(blocks, f"{where}.content", is_last=is_last)
            case "system":
                self.add(Message("system", _text_of(turn.content, f"{where}.content")))
            case _:
                raise BadRequest(f"{where}.role must be user, assistant or system.", param=f"{where}.role")

    def add(self, message: Message) -> None:
        """One more piece; what follows a piece of its own role is of the same turn."""
        if self._parts and (message.role == "tool" or self._parts[0].role != message.role):
            self.close()
        self._parts.append(message)

    def close(self) -> None:
        """Put the pieces together, all at once: a turn may have a hundred thousand."""
        parts, self._parts = self._parts, []
        if len(parts) > 1:
            joined = structs.replace(
                parts[0],
                content=_joined([part.content for part in parts]),
                tool_calls=[call for part in parts for call in part.tool_calls],
                reasoning=_joined([part.reasoning or "" for part in parts]) or None,
            )
            parts = [joined]
        self.messages += parts

    @property
    def is_empty(self) -> bool:
        return not self.messages and not self._parts

    def _read_user(self, blocks: list[Block], where: str) -> None:
        for index, block in enumerate(blocks):
            at = f"{where}[{index}]"
            if block.type == "tool_result":
                self.add(self._result(block, at))
            else:
                text = _text(block, at)
                if not text:
                    raise BadRequest(f"{where} must not be empty.", param=where)
                self.add(Message("user", text))
        if not blocks:
            raise BadRequest(f"{where} must not be empty.", param=where)

    def _result(self, block: Block, where: str) -> Message:
        if block.tool_use_id not in self._called:
            raise BadRequest(
                f"{where}.tool_use_id must be the id of an earlier tool_use.", param=f"{where}.tool_use_id"
            )
        text = _text_of(block.content or "", f"{where}.content")
        return Message("tool", text, tool_call_id=block.tool_use_id, name=self._called[block.tool_use_id])

    def _read_assistant(self, blocks: list[Block], where: str, *, is_last: bool) -> None:
        texts, thoughts, calls = [], [], []
        for index, block in enumerate(blocks):
            at = f"{where}[{index}]"
            match block.type:
                case "tool_use":
                    calls.append(_call(block, at))
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "redacted_thinking":
                    pass  # nobody but its author can read it
                case _:
                    texts.append(_text(block, at))
        message = Message("assistant", _joined(texts), calls, reasoning=_joined(thoughts) or None)
        if message != Message("assistant", ""):
            self.add(message)
        elif not is_last or self.is_empty:  # an empty turn at the end begins the answer with nothing
            raise BadRequest(f"{where} must not be empty.", param=where)
        self._called.update((call.id, call.name) for call in calls)


def _call(block: Block, where: str) -> ToolCall:
    for name in ("id", "name"):
        if not getattr(block, name):
            raise BadRequest(f"{where}.{name} is missing.", param=f"{where}.{name}")
    return ToolCall(block.id or "", block.name or "", msgspec.json.encode(block.input or {}).decode())


def _text_of(content: str | list[Block], where: str) -> str:
    if isinstance(content, str):
        return content
    return _joined([_text(block, f"{where}[{index}]") for index, block in enumerate(content)])


def _text(block: Block, where: str) -> str:
    if block.type != "text":
        raise BadRequest(
            f"{where}.type: blocks of type {block.type[:64]!r} are not supported here.", param=f"{where}.type"
        )
    if block.text is None:
        raise BadRequest(f"{where}.text is missing.", param=f"{where}.text")
    return block.text


def _joined(texts: list[str]) -> str:
    return _BETWEEN_BLOCKS.join(text for text in texts if text)
