"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from headrace.api.body import decode
from headrace.api.wire import openai_extras, openai_think, openai_tools, sse
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import OpenAIWire, Request, check_range, parsed
from headrace.api.wire.openai_calls import shown_calls
from headrace.api.wire.openai_fold import Answer, OpenAIFold, OpenAIWhole, Shape, shown_tokens
from headrace.api.wire.openai_messages import Turn, chat_of
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Delta, TokenLogprob, View
from headrace.broker.settings import ApiSettings


class ChatRequest(Request, frozen=True, kw_only=True):
    """The fields of this route; the last five are vLLM's and other servers'."""

    messages: list[Turn]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[openai_tools.ChatTool] | None = None
    tool_choice: str | openai_tools.Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


_decoder = msgspec.json.Decoder(ChatRequest)
_check_extras = openai_extras.checker(ChatRequest.__struct_fields__)


class OpenAIChat(OpenAIWire):
    """OpenAI's chat completions; see `format.Format`."""

    name: str = "openai.chat"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        _check_extras(body)
        prompt = chat_of(request.messages, request.continue_final_message, request.add_generation_prompt, limits)
        common = parsed(request, prompt, _logprobs(request), limits)
        use = openai_tools.of_chat(request.tools or [], request.tool_choice)
        job = structs.replace(
            common.job,
            tools=use.tools,
            tool_choice=use.choice,
            tool_name=use.name,
            parallel_tool_calls=request.parallel_tool_calls if use.tools else None,
            think=openai_think.of_chat(request.reasoning_effort, request.chat_template_kwargs, request.enable_thinking),
        )
        return structs.replace(common, job=job)

    def fold(self, job_id: str, view: View) -> OpenAIFold:
        return OpenAIFold(SHAPE, job_id, view, self.error_frame)

    def whole(self, job_id: str, view: View) -> OpenAIWhole:
        return OpenAIWhole(SHAPE, job_id, view)


def _logprobs(request: ChatRequest) -> int | None:
    """How many alternatives per token; `top_logprobs` 0 asks for nothing, so it may stand alone."""
    check_range(request, "top_logprobs", 0, 20)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _shown_logprobs(tokens: list[TokenLogprob]) -> dict[str, object]:
    return {"content": shown_tokens(tokens), "refusal": None}


def _shown_message(answer: Answer) -> dict[str, object]:
    """Text that is not there is null beside calls, and else empty."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return {"message": message}


def _parsed(event: Delta, job_id: str) -> bytes:
    """What a step adds that is not only text: thoughts, text and calls, together in one chunk."""
    delta: dict[str, object] = {}
    if event.reasoning:
        delta["reasoning_content"] = event.reasoning
    if event.text:
        delta["content"] = event.text
    if event.tool_calls:
        delta["tool_calls"] = shown_calls(event, job_id)
    return b'"delta":' + sse.encode(delta) if delta else b""


SHAPE = Shape(
    id_prefix="chatcmpl-",
    chunk_object="chat.completion.chunk",
    whole_object="chat.completion",
    opening=lambda view: b'"delta":{"role":"assistant","content":""}',
    text=(b'"delta":{"content":', b"}"),
    parsed=_parsed,
    closing=b'"delta":{}',
    reasons={},
    prefix=lambda view: "",
    message=_shown_message,
    logprobs=lambda: _shown_logprobs,
)
