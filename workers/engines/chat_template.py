"""A conversation becomes a prompt through the template that the model brings.

The template's own `<|im_end|>` must become a token, the same letters in a user's message must not: whoever could write
them would speak as the system. So each such word in a message is cut in two before the rendering, by a character that
stands nowhere in the conversation, and the prompt is given back as the pieces between the cuts, to be tokenized alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn

import jinja2
import jinja2.meta
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.broker.errors import BadRequest, ConfigError
from headrace.broker.messages import Message, Tool

PRIVATE_USE = range(0xE000, 0xF900)
_SIGNS_OF_THINKING = re.compile(r"think>|\[THINK\]|<\|channel\|>|reasoning_content")


class ChatTemplate:
    """A model's template; `special_texts` are the words that only the template may write.

    `system` is the system message of a conversation that brings none; None leaves it to the template.
    """

    def __init__(self, source: str, special_texts: Sequence[str], *, bos: str, eos: str, system: str | None) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"models: the model's chat template cannot be read: {error}") from error
        words = sorted((text for text in special_texts if len(text) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, words)) or r"(?!)")
        self._names = {"bos_token": bos, "eos_token": eos}
        self._system = system
        self.source = source
        self.knows_tools = "tools" in names
        self.thinking: Literal["switch", "always", None] = None
        """Whether the model reasons before it answers: as it is told, or always. Told by the words of the template."""
        if names & {"enable_thinking", "thinking"}:
            self.thinking = "switch"
        elif _SIGNS_OF_THINKING.search(source):
            self.thinking = "always"

    def with_system(self, messages: Sequence[Message]) -> list[Message]:
        """The conversation with the configured system message, if it brings none."""
        if self._system is None or any(turn.role == "system" for turn in messages):
            return list(messages)
        return [Message("system", self._system), *messages]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        think: bool | None = None,
        is_open: bool = False,
    ) -> list[str]:
        """The prompt up to where the model's answer begins, in pieces; raises BadRequest if the template refuses.

        If it `is_open`, the answer goes on in the middle of the last message, which is the assistant's.
        """
        turns = self.with_system(messages)
        begun = turns.pop() if is_open else None
        if begun is not None and (begun.role != "assistant" or begun.tool_calls):
            raise BadRequest("only an answer in words can be continued", param="messages")
        cut = _unused_character(turns, tools, begun)
        given: dict[str, Any] = {"tools": self._cut_all([openai_tool(tool) for tool in tools], cut)} if tools else {}
        if think is not None:
            given |= switches(think)
        try:
            text = self._template.render(
                messages=self._cut_all([openai_message(turn) for turn in turns], cut),
                add_generation_prompt=True,
                **given,
                **self._names,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise BadRequest(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from error
        if begun is not None:
            text += self.cut_specials(begun.content, cut)
        return text.split(cut)

    def cut_specials(self, content: str, cut: str) -> str:
        """`content` with each special word in it cut in two."""
        return self._special.sub(lambda found: found[0][0] + cut + found[0][1:], content)

    def _cut_all(self, value: Any, cut: str) -> Any:
        """The same for every text in a JSON value."""
        match value:
            case str():
                return self.cut_specials(value, cut)
            case list():
                return [self._cut_all(each, cut) for each in value]
            case dict():
                return {self.cut_specials(key, cut): self._cut_all(each, cut) for key, each in value.items()}
        return value


def switches(think: bool) -> dict[str, bool]:
    """What templates call it."""
    return {"enable_thinking": think, "thinking": think}


def openai_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates, and llama.cpp, expect it."""
    about = {"name": tool.name, "description": tool.description, "parameters": tool.parameters or {"type": "object"}}
    return {"type": "function", "function": about}


def openai_message(message: Message) -> dict[str, Any]:
    """A message as templates expect it; arguments of a call are an object, if they are one."""
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _object(call.arguments)}}
            for call in message.tool_calls
        ]
    optional = {
        "tool_call_id": message.tool_call_id,
        "name": message.name,
        "reasoning_content": message.reasoning,
    }
    return plain | {name: value for name, value in optional.items() if value is not None}


def _object(arguments: str) -> Any:
    try:
        found = json.loads(arguments)
    except ValueError:
        return arguments
    return found if isinstance(found, dict) else arguments


def _environment() -> ImmutableSandboxedEnvironment:
    """As Hugging Face's templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own writes for HTML: it escapes quotes and what is not ASCII.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)


def _unused_character(*parts: Any) -> str:
    used = set(msgspec.json.encode(parts).decode())
    for code in PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise BadRequest("the conversation uses every private-use character there is", param="messages")
