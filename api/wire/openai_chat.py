"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.api.body import decode
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import OpenAIWire, Request, check_range, check_supported, parsed
from headrace.api.wire.openai_fold import OpenAIFold, OpenAIWhole, Shape, shown_logprob
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Alternative, Chat, Message, TokenLogprob, View
from headrace.broker.settings import ApiSettings

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_HARMLESS: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
}


class Part(Struct, frozen=True):
    """A piece of a message; text is the only type there is."""

    type: str
    text: str | None = None


class Turn(Struct, frozen=True):
    """One message as the caller wrote it."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: Any = None
    function_call: Any = None


class ChatRequest(Request, frozen=True, kw_only=True):
    """The fields of this route; those typed Any are not supported, see `check_supported`."""

    messages: list[Turn]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None


_decoder = msgspec.json.Decoder(ChatRequest)


class OpenAIChat(OpenAIWire):
    """OpenAI's chat completions; see `format.Format`."""

    name: str = "openai.chat"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        check_supported(request, _HARMLESS)
        return parsed(request, _prompt(request.messages, limits), _logprobs(request), limits)

    def fold(self, job_id: str, view: View) -> OpenAIFold:
        return OpenAIFold(SHAPE, job_id, view)

    def whole(self, job_id: str, view: View) -> OpenAIWhole:
        return OpenAIWhole(SHAPE, job_id, view)


def _prompt(turns: list[Turn], limits: ApiSettings) -> Chat:
    if not 1 <= len(turns) <= limits.max_messages:
        raise BadRequest(f"There must be from 1 to {limits.max_messages} messages.", param="messages")
    return Chat([_message(turn, f"messages[{index}]") for index, turn in enumerate(turns)])


def _message(turn: Turn, where: str) -> Message:
    if turn.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if getattr(turn, name):
            raise BadRequest(f"{where}.{name} is not supported by this server.", param=f"{where}.{name}")
    if turn.content is None and turn.role != "assistant":
        raise BadRequest(f"{where}.content is missing.", param=f"{where}.content")
    return Message(ROLES[turn.role], _text(turn.content or "", f"{where}.content"))


def _text(content: str | list[Part], where: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type != "text":
            raise BadRequest("Only text parts are supported by this server.", param=f"{where}[{index}].type")
        if part.text is None:
            raise BadRequest(f"{where}[{index}].text is missing.", param=f"{where}[{index}].text")
    return "".join(part.text or "" for part in content)


def _logprobs(request: ChatRequest) -> int | None:
    """How many alternatives per token; `top_logprobs` 0 asks for nothing, so it may stand alone."""
    check_range(request, "top_logprobs", 0, 20)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs is only allowed when logprobs is true.", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _shown_logprobs(tokens: list[TokenLogprob]) -> dict[str, object]:
    content = [{**_shown(token), "top_logprobs": [_shown(other) for other in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def _shown(token: TokenLogprob | Alternative) -> dict[str, object]:
    piece = token.piece.decode(errors="replace")
    return {"token": piece, "logprob": shown_logprob(token.logprob), "bytes": list(token.piece)}


def _shown_message(text: str) -> dict[str, object]:
    return {"message": {"role": "assistant", "content": text}}


SHAPE = Shape(
    id_prefix="chatcmpl-",
    chunk_object="chat.completion.chunk",
    whole_object="chat.completion",
    opening=b'"delta":{"role":"assistant","content":""}',
    text=(b'"delta":{"content":', b"}"),
    closing=b'"delta":{}',
    message=_shown_message,
    logprobs=lambda: _shown_logprobs,
)
