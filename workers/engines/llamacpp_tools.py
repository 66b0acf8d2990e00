"""Tools for models whose template knows none: they are told in the system message, and a grammar sees to the form.

The answer is then either words, which do not begin with `{`, or one call: `{"name": "...", "arguments": {...}}`.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import structs

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Job, Message, Tool, ToolCallDelta
from headrace.workers.engines.llamacpp_grammar import Grammars, json_rule
from headrace.workers.engines.protocol import Step, Token

_NAME = re.compile(r"[\w.:/-]{1,128}")
_INVITATION = """You may call one of these functions, described as JSON:
{tools}
To call one, answer with nothing but {{"name": <its name>, "arguments": <an object by its parameters>}}."""


def active(job: Job) -> list[Tool]:
    """The tools that this job may call; raises BadRequest for names that are none, or not there."""
    for tool in job.tools:
        if not _NAME.fullmatch(tool.name):
            raise BadRequest(f"a tool cannot have the name {tool.name!r}", param="tools")
    if job.tool_name is not None:
        named = [tool for tool in job.tools if tool.name == job.tool_name]
        if not named:
            raise BadRequest(f"there is no tool {job.tool_name!r}", param="tool_choice")
        return named
    return [] if job.tool_choice == "none" else job.tools


def must_call(job: Job) -> bool:
    return job.tool_name is not None or job.tool_choice == "required"


def in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """A conversation whose tools, calls and results are words, for a template that knows none of them."""
    turns = [_in_words(message) for message in messages]
    if not tools:
        return turns
    invitation = _INVITATION.format(tools="\n".join(json.dumps(msgspec.to_builtins(tool)) for tool in tools))
    if turns and turns[0].role == "system":
        return [Message("system", f"{turns[0].content}\n\n{invitation}"), *turns[1:]]
    return [Message("system", invitation), *turns]


def _in_words(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"{message.name or 'The function'} returned: {message.content}")
    if message.tool_calls:
        calls = [f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}}}' for call in message.tool_calls]
        return Message(message.role, "\n".join([*([message.content] if message.content else []), *calls]))
    return message


def grammar(job: Job, grammars: Grammars) -> str:
    """Words or a call, or only a call; raises BadRequest for parameters that no grammar can keep."""
    tools = active(job)
    rules = ["start: call"] if must_call(job) else ["start: WORDS | call", "WORDS: /[^{](.|\\n)*/"]
    rules.append("call: " + " | ".join(f"call{n}" for n in range(len(tools))))
    for n, tool in enumerate(tools):
        rules.append(f'call{n}: {json.dumps(_opening(tool.name), ensure_ascii=False)} arguments{n} "}}"')
        rules.append(f"arguments{n}: {json_rule(_closed(tool.parameters), is_lenient=True)}")
    return grammars.checked("\n".join(rules), "tools")


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema of nothing but what it names, if it leaves that open: a small model would go on and on."""
    is_plain = not parameters.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
    return {"type": "object", **({"additionalProperties": False} if is_plain else {}), **parameters}


def _opening(name: str) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": '


class CallParser:
    """Turns the tokens of such an answer into parsed steps; the grammar has seen to its form."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._openings = {_opening(tool.name): tool.name for tool in tools}
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        self._kind: str | None = None
        self._arguments = ""

    def parse(self, step: Step) -> Step:
        """The same step with its text as words or as more of the call."""
        self._held += self._text(step.tokens)
        if self._kind is None and self._held:
            self._kind = "call" if self._held.startswith("{") else "words"
        if self._kind != "call":
            text, self._held = self._held, ""
            return structs.replace(step, text=text)
        deltas = self._deltas(is_last=step.end is not None)
        is_whole = step.end == "eos" and not self._openings
        return structs.replace(step, text="", tool_calls=deltas or None, end="tool_calls" if is_whole else step.end)

    def _text(self, tokens: Sequence[Token]) -> str:
        return "".join([self._decode(token.piece) for token in tokens if not token.is_special])

    def _deltas(self, *, is_last: bool) -> list[ToolCallDelta]:
        """Of what is held, all but the brace that closes the call; it might be any brace until something follows."""
        deltas = []
        for opening, name in self._openings.items():
            if self._held.startswith(opening):
                self._held = self._held.removeprefix(opening)
                self._openings = {}
                deltas.append(ToolCallDelta(0, f"call_{secrets.token_hex(12)}", name))
                break
        if self._openings:
            return []
        text, self._held = self._held[:-1], self._held[-1:]
        if is_last and not _is_json(self._arguments + text):
            text += self._held  # it was cut before it closed
        self._arguments += text
        return [*deltas, *([ToolCallDelta(0, arguments=text)] if text else [])]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
