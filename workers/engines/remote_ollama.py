"""Ollama's own API: JSON lines (`github.com/ollama/ollama/blob/main/docs/api.md`)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, structs

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Constraint, JsonObject, JsonSchema, Text, ToolCallDelta
from headrace.workers.engines.chat_template import openai_message, openai_tool
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote_frames import Event, LineFrames
from headrace.workers.engines.remote_wire import (
    Request,
    Tally,
    decode,
    failure,
    last_n_of,
    refuse,
    refuse_sampling,
    seed_of,
    without_none,
)

KNOWN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "typical_p",
)


class OllamaApi:
    """See `remote_wire.Api`."""

    probe = "/api/version"
    tools = True
    constraints: tuple[str, ...] = ("json",)

    def request(self, name: str, generation: Generation) -> Request:
        job = generation.job
        refuse(job, "suffix", "ignore_eos", "parallel_tool_calls")
        if job.logprobs is not None:
            raise BadRequest("the remote server tells no log-probabilities", param="logprobs")
        refuse_sampling(job, set(KNOWN))
        options = {field: getattr(job.sampling, field) for field in KNOWN}
        # Left out, it would be as many as Ollama likes.
        options |= {"num_predict": -1 if generation.max_tokens is None else generation.max_tokens}
        options |= {"seed": seed_of(generation), "repeat_last_n": last_n_of(job)}
        body = {"model": name, "stream": True, "options": without_none(options), "format": _format(job.constraint)}
        match job.prompt:
            case Chat() as chat:
                path, more = "/api/chat", self._chat(generation, chat)
            case Text(text):
                refuse(job, "tools", "think")
                path, more = "/api/generate", {"prompt": text, "raw": True}
            case _:
                raise BadRequest("the remote server takes prompts that are text only", param="prompt")
        return Request(path, without_none(body | more), LineFrames(), OllamaReader())

    @staticmethod
    def _chat(generation: Generation, chat: Chat) -> dict[str, Any]:
        job = generation.job
        if chat.is_open:
            raise BadRequest("the remote server cannot go on in the middle of an answer", param="messages")
        fields: dict[str, Any] = {
            "messages": [openai_message(message) for message in chat.messages],
            "think": job.think,
        }
        if job.tools and job.tool_choice != "none":
            if job.tool_choice == "required" or job.tool_name is not None:
                raise BadRequest("the remote server cannot be made to call a tool", param="tool_choice")
            fields["tools"] = [openai_tool(tool) for tool in job.tools]
        return fields


def _format(constraint: Constraint | None) -> Any:
    match constraint:
        case None:
            return None
        case JsonObject():
            return "json"
        case JsonSchema(schema):
            return schema
    raise BadRequest("the remote server keeps no grammar", param="response_format")


class _Function(Struct):
    name: str = ""
    arguments: Any = None


class _Call(Struct):
    function: _Function
    id: str | None = None


class _Message(Struct):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[_Call] | None = None


class _Line(Struct):
    message: _Message | None = None
    response: str = ""
    done: bool = False
    done_reason: str | None = None
    prompt_eval_count: int = 0
    eval_count: int | None = None
    error: str | None = None


class OllamaReader:
    """See `remote_wire.Reader`. A tool call comes whole, its arguments an object."""

    def __init__(self) -> None:
        self.is_over = False
        self._tally = Tally()
        self._calls = 0
        self._last: _Line | None = None

    def read(self, event: Event) -> list[Step]:
        line = decode(event, _Line)
        if line.error is not None:
            raise failure(line.error)
        if line.done:
            self.is_over, self._last = True, line
        message = line.message or _Message(line.response)
        calls = [self._call(call) for call in message.tool_calls or ()]
        step = self._tally.step(message.content, message.thinking, calls)
        return [step] if step.untold else []

    def _call(self, call: _Call) -> ToolCallDelta:
        index, self._calls = self._calls, self._calls + 1
        arguments = call.function.arguments if call.function.arguments is not None else {}
        text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        return ToolCallDelta(index, call.id or f"call_{index}", call.function.name, text)

    def end(self) -> Step | None:
        last = self._last
        if last is None:
            return None
        end = self._tally.last(
            "limit" if last.done_reason == "length" else "eos", last.prompt_eval_count, last.eval_count
        )
        return structs.replace(end, end="tool_calls") if self._calls and end.end == "eos" else end
