"""`POST /v1/completions`."""

from __future__ import annotations

import codecs
from typing import cast

import msgspec
from msgspec import structs

from headrace.api.body import decode
from headrace.api.wire import openai_extras, sse
from headrace.api.wire.checks import token_ids
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import OpenAIWire, Request, check_range, parsed
from headrace.api.wire.openai_fold import Answer, OpenAIFold, OpenAIWhole, Shape, shown_logprob
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Delta, Text, TokenLogprob, Tokens, View
from headrace.broker.settings import ApiSettings

_CHAT_ONLY = ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs")
_ECHO = "completions_echo"
"""The option of a view that holds the prompt, if it is to stand before the answer."""


class CompletionRequest(Request, frozen=True, kw_only=True):
    """The fields of this route."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)
_check_extras = openai_extras.checker(CompletionRequest.__struct_fields__, dict.fromkeys(_CHAT_ONLY, ()))


class OpenAICompletions(OpenAIWire):
    """OpenAI's completions; see `format.Format`."""

    name: str = "openai.completions"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        _check_extras(body)
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise BadRequest("best_of other than n is not supported by this server.", param="best_of")
        check_range(request, "logprobs", 0, 5)
        prompt = _prompt(request.prompt)
        echo = _echo(request, prompt)
        if request.suffix and not isinstance(prompt, Text):
            raise BadRequest("suffix goes with a prompt that is text.", param="suffix")
        common = parsed(request, prompt, request.logprobs, limits)
        job = structs.replace(common.job, suffix=request.suffix or None)
        return structs.replace(common, job=job, options={_ECHO: echo} if echo else {})

    def fold(self, job_id: str, view: View) -> OpenAIFold:
        return OpenAIFold(SHAPE, job_id, view, self.error_frame)

    def whole(self, job_id: str, view: View) -> OpenAIWhole:
        return OpenAIWhole(SHAPE, job_id, view)


def _prompt(prompt: str | list[str | int | list[int]]) -> Text | Tokens:
    """One prompt, in any of its four forms."""
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        return _tokens(cast(list[int], prompt))
    if isinstance(prompt, list) and len(prompt) > 1:
        raise BadRequest("Only one prompt per request is supported by this server.", param="prompt")
    one = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if not one:
        raise BadRequest("prompt must not be empty.", param="prompt")
    return Text(one) if isinstance(one, str) else _tokens(cast(list[int], one))


def _echo(request: CompletionRequest, prompt: Text | Tokens) -> str:
    """The prompt, if it is to stand before the answer; nobody here knows the text of tokens, or its probabilities."""
    if not request.echo:
        return ""
    if isinstance(prompt, Tokens) or request.logprobs is not None:
        raise BadRequest("echo goes with a prompt that is text, and without logprobs.", param="echo")
    return prompt.text


def _tokens(ids: list[int]) -> Tokens:
    return Tokens(token_ids(ids, "prompt"))


class _Logprobs:
    """The old shape: four lists side by side. Offsets are in characters of the answer; half a character moves none."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, tokens: list[TokenLogprob]) -> dict[str, object]:
        return {
            "tokens": [token.piece.decode(errors="replace") for token in tokens],
            "token_logprobs": [shown_logprob(token.logprob) for token in tokens],
            "top_logprobs": [_top(token) for token in tokens],
            "text_offset": [self._next_offset(token.piece) for token in tokens],
        }

    def _next_offset(self, piece: bytes) -> int:
        offset = self._offset
        self._offset += len(self._decoder.decode(piece))
        return offset


def _top(token: TokenLogprob) -> dict[str, float]:
    """The alternatives and the chosen token; of two that read the same, the likelier one, which comes first."""
    top: dict[str, float] = {}
    for other in token.top:
        top.setdefault(other.piece.decode(errors="replace"), shown_logprob(other.logprob))
    top.setdefault(token.piece.decode(errors="replace"), shown_logprob(token.logprob))
    return top


def _echoed(view: View) -> str:
    return str(view.options.get(_ECHO, ""))


def _opening(view: View) -> bytes:
    echo = _echoed(view)
    return b'"text":' + sse.encode(echo) if echo else b""


def _shown_text(answer: Answer) -> dict[str, object]:
    return {"text": answer.text}


def _parsed(event: Delta, job_id: str) -> bytes:
    """Thoughts and calls have no place in this format: a stream that began in another one is read here."""
    return b'"text":' + sse.encode(event.text) if event.text else b""


SHAPE = Shape(
    id_prefix="cmpl-",
    chunk_object="text_completion",
    whole_object="text_completion",
    opening=_opening,
    text=(b'"text":', b""),
    parsed=_parsed,
    closing=b'"text":""',
    reasons={"tool_calls": "stop"},
    prefix=_echoed,
    message=_shown_text,
    logprobs=_Logprobs,
)
