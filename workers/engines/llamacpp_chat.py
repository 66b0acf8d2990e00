"""Conversations that llama.cpp renders and parses itself: tools and reasoning, in the form that each model has of them.

Its OpenAI chat route tells no token ids but those of log-probabilities, so such an answer cannot be continued. Only
what is named here reaches the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from headrace.broker.errors import EngineFailed
from headrace.broker.messages import Alternative, Chat, JsonObject, JsonSchema, Message, TokenLogprob, ToolCallDelta
from headrace.workers.engines.chat_template import ChatTemplate, openai_tool, switches
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_grammar import without_options
from headrace.workers.engines.llamacpp_tools import active, must_call
from headrace.workers.engines.llamacpp_wire import Progress, Refused, refusal, sampling_body
from headrace.workers.engines.protocol import Generation, Step, Token

ZERO_WIDTH_SPACE = "\u200b"
"""It cuts special words in a user's text: llama.cpp tokenizes this prompt, and would take them for tokens."""


def chat_body(generation: Generation, template: ChatTemplate, context_tokens: int) -> dict[str, Any]:
    """The request for one sequence."""
    job = generation.job
    assert isinstance(job.prompt, Chat)
    body = sampling_body(generation, context_tokens)
    body |= {
        "messages": [_message(turn, template) for turn in template.with_system(job.prompt.messages)],
        "stream_options": {"include_usage": True},
        # Each chunk then says how many tokens there were so far.
        "timings_per_token": True,
        "reasoning_format": "auto",
    }
    if tools := active(job):
        body["tools"] = [openai_tool(tool) for tool in tools]
        body["tool_choice"] = "required" if must_call(job) else "auto"
        if job.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = job.parallel_tool_calls
    if job.think is not None:
        body["chat_template_kwargs"] = switches(job.think)
    if job.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": max(1, job.logprobs)}
    if isinstance(job.constraint, JsonSchema):
        body["json_schema"] = without_options(job.constraint.schema)
    elif isinstance(job.constraint, JsonObject):
        body["json_schema"] = {"type": "object"}
    return body


def _message(turn: Message, template: ChatTemplate) -> dict[str, Any]:
    def clean(text: str) -> str:
        return template.cut_specials(text, ZERO_WIDTH_SPACE)

    message: dict[str, Any] = {"role": turn.role, "content": clean(turn.content)}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": clean(call.name), "arguments": clean(call.arguments)},
            }
            for call in turn.tool_calls
        ]
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    if turn.name is not None:
        message["name"] = clean(turn.name)
    if turn.reasoning is not None:
        message["reasoning_content"] = clean(turn.reasoning)
    return message


class _Function(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    function: _Function = _Function()


class _Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _Candidate(Struct, frozen=True):
    id: int
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(Struct, frozen=True):
    content: list[_Candidate] = []


class _Choice(Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(Struct, frozen=True):
    completion_tokens: int
    prompt_tokens: int


class _Timings(Struct, frozen=True):
    predicted_n: int = 0


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings = _Timings()
    prompt_progress: Progress | None = None
    error: Refused | None = None


_decoder = msgspec.json.Decoder(_Chunk)
_ENDS: dict[str, Any] = {"stop": "eos", "length": "limit", "tool_calls": "tool_calls"}


class ChatReader:
    """Turns the chunks of one conversation into parsed steps, like `llamacpp_wire.StreamReader`.

    The last chunk has the usage; why it ended is in one before.
    """

    def __init__(self, vocab: GgufVocab, logprobs: int | None) -> None:
        self._vocab = vocab
        self._logprobs = logprobs
        self._told = 0
        self._cached_tokens = 0
        self._end: str | None = None

    def read(self, raw: bytes) -> Step | None:
        """The step of a chunk, if it has one. Nothing may be read after a step with `end`."""
        try:
            chunk = _decoder.decode(raw)
        except msgspec.MsgspecError as error:
            raise EngineFailed(f"llama.cpp sent what cannot be read: {error}") from error
        if chunk.error is not None:
            raise refusal(chunk.error)
        if chunk.prompt_progress is not None:
            self._cached_tokens = max(self._cached_tokens, chunk.prompt_progress.cache)
            return None
        if chunk.choices:
            return self._step(chunk.choices[0], chunk.timings.predicted_n)
        if chunk.usage is None or self._end is None:
            raise EngineFailed(f"llama.cpp ended in another way than expected: {raw[:200]!r}")
        untold = chunk.usage.completion_tokens - self._told
        return Step(
            (), text="", end=_ENDS.get(self._end, "eos"), untold=untold, prompt_tokens=chunk.usage.prompt_tokens
        )

    def _step(self, choice: _Choice, predicted: int) -> Step | None:
        self._end = choice.finish_reason or self._end
        delta = choice.delta
        calls = [
            ToolCallDelta(call.index, call.id or "", call.function.name or "", call.function.arguments or "")
            for call in delta.tool_calls
        ]
        if not (delta.content or delta.reasoning_content or calls):
            return None
        scores = choice.logprobs.content if self._logprobs is not None and choice.logprobs else []
        tokens: list[Token] = [self._vocab.tokens[score.id] for score in scores]
        untold = max(0, predicted - self._told - len(tokens))
        self._told += len(tokens) + untold
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        return Step(
            tokens,
            [self._score(score) for score in scores] or None,
            cached_tokens=cached_tokens,
            text=delta.content or "",
            reasoning=delta.reasoning_content,
            tool_calls=calls or None,
            untold=untold,
        )

    def _score(self, told: _Candidate) -> TokenLogprob:
        pieces = self._vocab.tokens
        top = [Alternative(each.id, pieces[each.id].piece, each.logprob) for each in told.top_logprobs]
        return TokenLogprob(told.id, pieces[told.id].piece, told.logprob, top[: self._logprobs])
