"""What the scripted engine answers to jobs that generate nothing; all of it can be computed by anybody.

- `tokenize`: one id for every four bytes of the text, or of what `render` makes of a conversation
  (`scripted_parts.token_ids`), nothing added.
- `detokenize`: the inverse, with U+FFFD for what is no UTF-8; it knows the oracle's tokens too.
- `render`: a line `<|role|>`, a line with the content, for each message; its reasoning and tool calls, as JSON, have
  lines of their own before and after it. Tools are a line of JSON at the beginning, `<|assistant|>` is the last line.
- `count`: what `encode` would count.
- `embed`: a vector of length 1 for each input, made of the SHA-256 of its text; of token ids, with spaces between.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable

import msgspec

from headrace.broker.errors import BadRequest, ContextLengthExceeded
from headrace.broker.messages import Batch, Chat, Job, Message, Prompt, Result, Text, Tokens
from headrace.broker.models import ScriptedModel
from headrace.workers.engines.scripted_parts import piece, token_ids


def answer(job: Job, model: ScriptedModel, count: Callable[[Prompt], int]) -> tuple[Result, int]:
    """The result and its prompt tokens; raises BadRequest for a prompt that this kind of job cannot have."""
    match job.kind, job.prompt:
        case "tokenize", Text(text):
            return _tokens(text)
        case "tokenize", Chat():
            return _tokens(render(job))
        case "detokenize", Tokens(ids):
            return Result({"text": _text(ids)}), len(ids)
        case "render", Chat():
            return Result({"text": render(job)}), count(job.prompt)
        case "count", Chat() | Text() | Tokens():
            tokens = count(job.prompt)
            return Result({"tokens": tokens}), tokens
        case "embed", Batch(inputs):
            return _embed(inputs, model, count)
        case "embed", (Text() | Tokens()) as one:
            return _embed([one], model, count)
    raise BadRequest(f"a job of kind {job.kind} has no such prompt", param="prompt")


def render(job: Job) -> str:
    """See the module."""
    assert isinstance(job.prompt, Chat)
    lines = [msgspec.json.encode(job.tools).decode()] if job.tools else []
    for message in job.prompt.messages:
        lines += _lines(message)
    return "\n".join(lines) if job.prompt.is_open else "\n".join([*lines, "<|assistant|>", ""])


def _lines(message: Message) -> list[str]:
    reasoning = [f"<|think|>{message.reasoning}"] if message.reasoning else []
    calls = [msgspec.json.encode(message.tool_calls).decode()] if message.tool_calls else []
    return [f"<|{message.role}|>", *reasoning, message.content, *calls]


def vector(text: str, dimensions: int) -> list[float]:
    """The embedding of a text: floats from -1 to 1, two bytes of SHA-256(`<block>|<text>`) each, scaled to length 1."""
    blocks = [hashlib.sha256(f"{block}|{text}".encode()).digest() for block in range(-(-dimensions // 16))]
    values = [value / 32768 for (value,) in struct.iter_unpack("<h", b"".join(blocks))][:dimensions]
    length = math.sqrt(sum(value * value for value in values)) or 1.0
    return [value / length for value in values]


def _tokens(text: str) -> tuple[Result, int]:
    ids = token_ids(text.encode(errors="replace"))
    return Result({"tokens": ids, "pieces": [piece(token_id) for token_id in ids]}), len(ids)


def _embed(inputs: list[Text | Tokens], model: ScriptedModel, count: Callable[[Prompt], int]) -> tuple[Result, int]:
    counts = [count(each) for each in inputs]
    if any(tokens > model.context_tokens for tokens in counts):
        raise ContextLengthExceeded(
            f"an input has {max(counts)} tokens; this model's context is {model.context_tokens}", param="input"
        )
    texts = [each.text if isinstance(each, Text) else " ".join(map(str, each.token_ids)) for each in inputs]
    vectors = [struct.pack(f"<{model.dimensions}f", *vector(text, model.dimensions)) for text in texts]
    return Result({"embeddings": vectors, "tokens": counts}), sum(counts)


def _text(ids: list[int]) -> str:
    try:
        return b"".join(map(piece, ids)).decode("utf-8", "replace")
    except OverflowError as error:
        raise BadRequest("there are token ids that the model does not know", param="tokens") from error
