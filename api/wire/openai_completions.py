"""`POST /v1/completions`."""

from __future__ import annotations

import codecs
from typing import Any, cast

import msgspec

from headrace.api.body import decode
from headrace.api.wire.format import Parsed
from headrace.api.wire.openai import TOKEN_ID_MAX, OpenAIWire, Request, check_range, check_supported, parsed
from headrace.api.wire.openai_fold import OpenAIFold, OpenAIWhole, Shape, shown_logprob
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Text, TokenLogprob, Tokens, View
from headrace.broker.settings import ApiSettings

_HARMLESS: dict[str, tuple[object, ...]] = {"echo": (False,), "best_of": (1,), "suffix": ("",)}


class CompletionRequest(Request, frozen=True, kw_only=True):
    """The fields of this route."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None


_decoder = msgspec.json.Decoder(CompletionRequest)


class OpenAICompletions(OpenAIWire):
    """OpenAI's completions; see `format.Format`."""

    name: str = "openai.completions"

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        request = decode(_decoder, body, limits)
        check_supported(request, _HARMLESS)
        if request.best_of is not None and request.n not in (None, request.best_of):
            raise BadRequest("best_of other than n is not supported by this server.", param="best_of")
        check_range(request, "logprobs", 0, 5)
        return parsed(request, _prompt(request.prompt), request.logprobs, limits)

    def fold(self, job_id: str, view: View) -> OpenAIFold:
        return OpenAIFold(SHAPE, job_id, view)

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


def _tokens(ids: list[int]) -> Tokens:
    if not all(0 <= each <= TOKEN_ID_MAX for each in ids):
        raise BadRequest(f"The token ids of prompt must be from 0 to {TOKEN_ID_MAX}.", param="prompt")
    return Tokens(ids)


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


def _shown_text(text: str) -> dict[str, object]:
    return {"text": text}


SHAPE = Shape(
    id_prefix="cmpl-",
    chunk_object="text_completion",
    whole_object="text_completion",
    opening=b"",
    text=(b'"text":', b""),
    closing=b'"text":""',
    message=_shown_text,
    logprobs=_Logprobs,
)
