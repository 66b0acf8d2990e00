"""What the scripted engine says where it does not say the oracle's words: JSON, tool calls, reasoning, written scripts.

Such an answer is a list of parts, one token each, and known as a whole before it begins.

- A script whose entries are all text is none of these. With an entry `{reasoning: "..."}` or `{tool_call: {name: ...,
  arguments: ...}}` it is: a reasoning entry is one part; a tool call is one part with its id and name, and one for
  every four characters of its arguments. The token ids are the parts' places. The answer ends with `tool_calls` if
  it has any (and `script_end` is `eos`); a job with `think: false` gets the script without its reasoning.
- Without a script, tools with `tool_choice` `required` or a named tool are one call of the named tool, or of tool
  `oracle(text, seed, choice, 0) % number of tools`; its arguments fit the tool's schema, filled from the oracle
  (`scripted_json.py`). The choice `auto` calls nothing: the answer is the oracle's words.
- Without a script, a JSON constraint is JSON of its schema, filled in the same way. Of another constraint it knows
  nothing: BadRequest.

The token of some text is its bytes, four or less: its id is `length << 32 | the bytes as a big-endian number`. An id
below 2**32 is one of the oracle's. A call's id is `call_` and the oracle's word at its first part's place, in hex.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Grammar, Job, JsonSchema, Regex, ToolCallDelta
from headrace.broker.models import ScriptedModel, ScriptedPart
from headrace.workers.engines.protocol import Step, Token
from headrace.workers.engines.scripted_json import fitting

SPECIAL = "<|im_end|>"
TOKEN_BYTES = 4

Word = Callable[[int], int]
"""The oracle's word, 32 bits, at a place of the answer."""


class Part(Struct, frozen=True):
    """One token of such an answer; `call` is the place of its tool call's first part."""

    token: Token
    reasoning: str | None = None
    delta: ToolCallDelta | None = None
    call: int = 0


def token_ids(data: bytes) -> list[int]:
    """The tokens of a text: four bytes each."""
    pieces = [data[at : at + TOKEN_BYTES] for at in range(0, len(data), TOKEN_BYTES)]
    return [len(piece) << 32 | int.from_bytes(piece) for piece in pieces]


def piece(token_id: int) -> bytes:
    """The bytes of a token of text or of the oracle; raises OverflowError if it is neither."""
    length = token_id >> 32
    if not 0 <= length <= TOKEN_BYTES:
        raise OverflowError
    return (token_id & 0xFFFF_FFFF).to_bytes(length) if length else b" %08x" % token_id


def script_parts(model: ScriptedModel) -> list[Part]:
    """The parts of the model's script."""
    parts: list[Part] = []
    calls = 0
    for entry in model.script:
        at = len(parts)
        if isinstance(entry, ScriptedPart):
            if entry.reasoning is not None:
                parts.append(Part(Token(at, b""), reasoning=entry.reasoning))
            if entry.tool_call is not None:
                arguments = entry.tool_call.arguments
                text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
                deltas = _call(calls, entry.tool_call.name, text)
                first = len(parts)
                parts += [Part(Token(first + k, b""), delta=d, call=first) for k, d in enumerate(deltas)]
                calls += 1
        else:
            data = entry.encode() if isinstance(entry, str) else bytes(entry)
            parts.append(Part(Token(at, data, data == SPECIAL.encode())))
    return parts


def parts_of(job: Job, word: Word) -> list[Part] | None:
    """The parts of an answer without a script; None if it is the oracle's words. Raises BadRequest, see the module."""
    if job.tools and (job.tool_name is not None or job.tool_choice == "required"):
        return _tool_call(job, word)
    match job.constraint:
        case None:
            return None
        case Grammar():
            raise BadRequest("the scripted engine knows no grammars", param="grammar")
        case Regex():
            raise BadRequest("the scripted engine knows no patterns", param="regex")
    schema = job.constraint.schema if isinstance(job.constraint, JsonSchema) else {"required": ["answer"]}
    text = fitting(schema, word, "response_format")
    return [Part(Token(token_id, piece(token_id))) for token_id in token_ids(text.encode())]


def _tool_call(job: Job, word: Word) -> list[Part]:
    named = [tool for tool in job.tools if tool.name == job.tool_name]
    if job.tool_name is not None and not named:
        raise BadRequest(f"there is no tool {job.tool_name!r}", param="tool_choice")
    tool = named[0] if named else job.tools[word(0) % len(job.tools)]
    schema = tool.parameters or {"type": "object"}
    arguments = fitting(schema, word, "tools")
    ids = [word(0), *token_ids(arguments.encode())]
    deltas = _call(0, tool.name, arguments)
    return [Part(Token(i, piece(i)), delta=delta) for i, delta in zip(ids, deltas, strict=True)]


def _call(index: int, name: str, arguments: str) -> list[ToolCallDelta]:
    pieces = [arguments[at : at + TOKEN_BYTES] for at in range(0, len(arguments), TOKEN_BYTES)]
    return [ToolCallDelta(index, name=name), *(ToolCallDelta(index, arguments=text) for text in pieces)]


def step_of(part: Part, word: Word, end: Literal["eos", "limit", "tool_calls"] | None) -> Step:
    """The step of one part."""
    if part.delta is not None:
        delta = part.delta
        if delta.name:
            delta = ToolCallDelta(delta.index, f"call_{word(part.call):08x}", delta.name, delta.arguments)
        return Step([part.token], end=end, text="", tool_calls=[delta])
    if part.reasoning is not None:
        return Step([part.token], end=end, text="", reasoning=part.reasoning)
    return Step([part.token], end=end)


def end_of(parts: Sequence[Part]) -> Literal["eos", "tool_calls"]:
    return "tool_calls" if any(part.delta is not None for part in parts) else "eos"
