"""OpenAI's chat and completions, as many servers speak them (`platform.openai.com/docs/api-reference`)."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from headrace.broker.errors import BadRequest
from headrace.broker.messages import (
    Alternative,
    Chat,
    Constraint,
    Job,
    JsonObject,
    JsonSchema,
    Text,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
)
from headrace.workers.engines.chat_template import openai_message, openai_tool
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote_frames import Event, SseFrames
from headrace.workers.engines.remote_wire import (
    End,
    Request,
    Tally,
    Wrong,
    decode,
    failure,
    refuse,
    refuse_sampling,
    seed_of,
    without_none,
)

ENDS: dict[str, End] = {"length": "limit", "tool_calls": "tool_calls", "function_call": "tool_calls"}
UNTOLD_ID = -1
"""The id of a token whose server tells none."""


class OpenaiApi:
    """See `remote_wire.Api`."""

    probe = "/v1/models"
    tools = True
    constraints: tuple[str, ...] = ("json",)

    def request(self, name: str, generation: Generation) -> Request:
        job = generation.job
        refuse(job, "suffix", "think", "ignore_eos")
        known = {"temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias"}
        refuse_sampling(job, known)
        sampling = job.sampling
        bias = {str(token_id): value for token_id, value in (sampling.logit_bias or {}).items()}
        body = {
            "model": name,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": generation.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "seed": seed_of(generation),
            "logit_bias": bias or None,
        }
        match job.prompt:
            case Chat() as chat:
                path, more = "/v1/chat/completions", self._chat(job, chat)
            case Text(prompt) | Tokens(prompt):
                refuse(job, "tools", "constraint")
                path, more = "/v1/completions", {"prompt": prompt, "logprobs": job.logprobs}
            case _:
                raise BadRequest("one prompt at a time", param="prompt")
        return Request(path, without_none(body | more), SseFrames(), OpenaiReader())

    @staticmethod
    def _chat(job: Job, chat: Chat) -> dict[str, Any]:
        if chat.is_open:
            raise BadRequest("the remote server cannot go on in the middle of an answer", param="messages")
        fields: dict[str, Any] = {"messages": [_message(message) for message in chat.messages]}
        if job.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": job.logprobs or None}
        if job.tools:
            named = {"type": "function", "function": {"name": job.tool_name}}
            fields["tools"] = [openai_tool(tool) for tool in job.tools]
            fields["tool_choice"] = job.tool_choice if job.tool_name is None else named
            fields["parallel_tool_calls"] = job.parallel_tool_calls
        fields["response_format"] = _response_format(job.constraint)
        return fields


def _message(message: Any) -> dict[str, Any]:
    """As `openai_message`, but with the arguments of a call as the text that they are on the wire."""
    plain = openai_message(message)
    for call, was in zip(plain.get("tool_calls", ()), message.tool_calls, strict=True):
        call["function"]["arguments"] = was.arguments
    plain.pop("reasoning_content", None)
    return plain


def _response_format(constraint: Constraint | None) -> dict[str, Any] | None:
    match constraint:
        case None:
            return None
        case JsonObject():
            return {"type": "json_object"}
        case JsonSchema(schema):
            return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    raise BadRequest("the remote server keeps no grammar", param="response_format")


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Candidate(Struct):
    token: str = ""
    logprob: float = 0.0
    data: list[int] | None = field(name="bytes", default=None)
    top_logprobs: list[_Candidate] = []

    @property
    def piece(self) -> bytes:
        return self.token.encode() if self.data is None else bytes(self.data)


class _Logprobs(Struct):
    content: list[_Candidate] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Wrong | str | None = None


class OpenaiReader:
    """See `remote_wire.Reader`. The terminal event is the finish reason; the usage and `[DONE]` may come after it."""

    def __init__(self) -> None:
        self.is_over = False
        self._tally = Tally()
        self._end: End | None = None
        self._usage: _Usage | None = None

    def read(self, event: Event) -> list[Step]:
        if event.data.strip() == b"[DONE]":
            self.is_over = True
            return []
        chunk = decode(event, _Chunk)
        if chunk.error is not None or event.name == "error":
            raise failure(chunk.error or "")
        self._usage = chunk.usage or self._usage
        if not chunk.choices:
            return []
        choice = chunk.choices[0]
        if choice.finish_reason is not None:
            self._end = ENDS.get(choice.finish_reason, "eos")
        step = self._step(choice)
        return [step] if step.untold or step.logprobs else []

    def _step(self, choice: _Choice) -> Step:
        logprobs = _scores(choice.logprobs)
        delta = choice.delta
        if delta is None:
            return self._tally.step(choice.text or "", logprobs=logprobs)
        calls = [_call_delta(call) for call in delta.tool_calls or ()]
        reasoning = delta.reasoning_content or delta.reasoning
        return self._tally.step(delta.content or "", reasoning, calls, logprobs=logprobs)

    def end(self) -> Step | None:
        if self._end is None:
            return None
        usage = self._usage or _Usage()
        return self._tally.last(self._end, usage.prompt_tokens, usage.completion_tokens)


def _call_delta(call: _Call) -> ToolCallDelta:
    function = call.function or _Function()
    return ToolCallDelta(call.index, call.id or "", function.name or "", function.arguments or "")


def _scores(told: _Logprobs | None) -> list[TokenLogprob] | None:
    if told is None:
        return None
    if told.content is not None:
        return [TokenLogprob(UNTOLD_ID, c.piece, c.logprob, _candidates(c.top_logprobs)) for c in told.content]
    scores = []
    tops = told.top_logprobs or [None] * len(told.tokens or ())
    for token, logprob, top in zip(told.tokens or (), told.token_logprobs or (), tops, strict=False):
        others = [Alternative(UNTOLD_ID, text.encode(), value) for text, value in (top or {}).items()]
        scores.append(TokenLogprob(UNTOLD_ID, token.encode(), logprob or 0.0, others))
    return scores or None


def _candidates(told: list[_Candidate]) -> list[Alternative]:
    return [Alternative(UNTOLD_ID, candidate.piece, candidate.logprob) for candidate in told]
