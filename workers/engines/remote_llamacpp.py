"""llama.cpp's own API (`llama.cpp/tools/server/README.md`): it tells no reasoning and parses no tools."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Constraint, Grammar, JsonObject, JsonSchema, Text, Tokens
from headrace.workers.engines.chat_template import openai_message
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote_frames import Event, SseFrames
from headrace.workers.engines.remote_wire import (
    Request,
    Tally,
    Wrong,
    decode,
    failure,
    last_n_of,
    refuse,
    seed_of,
    without_none,
)


class LlamacppApi:
    """See `remote_wire.Api`."""

    probe = "/health"
    tools = False
    constraints: tuple[str, ...] = ("json", "grammar")

    def request(self, name: str, generation: Generation) -> Request:
        job, sampling = generation.job, generation.job.sampling
        refuse(job, "suffix", "think")
        if job.tools and job.tool_choice != "none":
            raise BadRequest("the remote server's own API calls no tools; use `api: openai`", param="tools")
        if job.logprobs is not None:
            raise BadRequest("the remote server's own API is not asked for log-probabilities", param="logprobs")
        body: dict[str, Any] = {
            "stream": True,
            "n_predict": -1 if generation.max_tokens is None else generation.max_tokens,
            "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
            "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": sampling.min_p or 0.0,
            "typical_p": sampling.typical_p,
            "frequency_penalty": sampling.frequency_penalty,
            "presence_penalty": sampling.presence_penalty,
            "repeat_penalty": sampling.repeat_penalty,
            "repeat_last_n": last_n_of(job),
            "seed": seed_of(generation),
            "logit_bias": [[token_id, bias] for token_id, bias in (sampling.logit_bias or {}).items()] or None,
            "ignore_eos": job.ignore_eos or None,
            **_constraint(job.constraint),
        }
        render = None
        match job.prompt:
            case Chat() as chat:
                if chat.is_open:
                    raise BadRequest("the remote server cannot go on in the middle of an answer", param="messages")
                render = ("/apply-template", {"messages": [openai_message(message) for message in chat.messages]})
            case Text(prompt) | Tokens(prompt):
                body["prompt"] = prompt
            case _:
                raise BadRequest("one prompt at a time", param="prompt")
        return Request("/completion", without_none(body), SseFrames(), LlamacppReader(), render)


def _constraint(constraint: Constraint | None) -> dict[str, Any]:
    match constraint:
        case None:
            return {}
        case JsonObject():
            return {"json_schema": {"type": "object"}}
        case JsonSchema(schema):
            return {"json_schema": schema}
        case Grammar(gbnf):
            return {"grammar": gbnf}
    raise BadRequest("the remote server keeps no regular expression", param="response_format")


class _Chunk(Struct):
    content: str = ""
    stop: bool = False
    stop_type: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int = 0
    error: Wrong | None = None
    message: str | None = None
    """Of an error that comes as an event `error:` of its own."""


class LlamacppReader:
    """See `remote_wire.Reader`."""

    def __init__(self) -> None:
        self.is_over = False
        self._tally = Tally()
        self._last: _Chunk | None = None

    def read(self, event: Event) -> list[Step]:
        chunk = decode(event, _Chunk)
        if chunk.error is not None or event.name == "error":
            raise failure(chunk.error or chunk.message or "")
        if chunk.stop:
            self.is_over, self._last = True, chunk
        step = self._tally.step(chunk.content)
        return [step] if step.untold else []

    def end(self) -> Step | None:
        last = self._last
        if last is None:
            return None
        return self._tally.last(
            "limit" if last.stop_type == "limit" else "eos", last.tokens_evaluated, last.tokens_predicted
        )
