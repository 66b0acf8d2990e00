"""Text Generation Inference: its own `/generate_stream` for plain prompts, OpenAI's chat for conversations."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Constraint, Job, JsonObject, JsonSchema, Regex, Text
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote_frames import Event, SseFrames
from headrace.workers.engines.remote_openai import OpenaiApi
from headrace.workers.engines.remote_wire import (
    Request,
    Tally,
    decode,
    failure,
    refuse,
    refuse_sampling,
    seed_of,
    without_none,
)


class TgiApi:
    """See `remote_wire.Api`."""

    probe = "/health"
    tools = True
    constraints: tuple[str, ...] = ("json", "regex")

    def request(self, name: str, generation: Generation) -> Request:
        job = generation.job
        if isinstance(job.prompt, Chat):
            return OpenaiApi().request(name, generation)
        if not isinstance(job.prompt, Text):
            raise BadRequest("the remote server takes prompts that are text only", param="prompt")
        refuse(job, "suffix", "think", "ignore_eos", "tools")
        if job.logprobs is not None:
            raise BadRequest("the remote server is not asked for log-probabilities here", param="logprobs")
        body = {"inputs": job.prompt.text, "parameters": without_none(self._parameters(generation, job))}
        return Request("/generate_stream", body, SseFrames(), TgiReader())

    @staticmethod
    def _parameters(generation: Generation, job: Job) -> dict[str, Any]:
        sampling = job.sampling
        known = {"temperature", "top_p", "top_k", "seed", "repeat_penalty", "frequency_penalty", "typical_p"}
        refuse_sampling(job, known)
        is_greedy = sampling.temperature == 0  # as a number it is refused there
        return {
            "max_new_tokens": generation.max_tokens,
            "do_sample": not is_greedy,
            "temperature": None if is_greedy else sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p is None or sampling.top_p < 1 else None,
            "top_k": sampling.top_k if sampling.top_k and sampling.top_k > 0 else None,
            "typical_p": sampling.typical_p if sampling.typical_p is None or sampling.typical_p < 1 else None,
            "repetition_penalty": sampling.repeat_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": seed_of(generation),
            "grammar": _grammar(job.constraint),
        }


def _grammar(constraint: Constraint | None) -> dict[str, Any] | None:
    match constraint:
        case None:
            return None
        case JsonObject():
            return {"type": "json", "value": {"type": "object"}}
        case JsonSchema(schema):
            return {"type": "json", "value": schema}
        case Regex(pattern):
            return {"type": "regex", "value": pattern}
    raise BadRequest("the remote server keeps no such grammar", param="response_format")


class _Token(Struct):
    id: int = 0
    text: str = ""
    special: bool = False


class _Details(Struct):
    finish_reason: str
    generated_tokens: int | None = None
    input_length: int | None = None


class _Chunk(Struct):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: str | None = None


class TgiReader:
    """See `remote_wire.Reader`. The last event has the whole text too, which is not read."""

    def __init__(self) -> None:
        self.is_over = False
        self._tally = Tally()
        self._details: _Details | None = None

    def read(self, event: Event) -> list[Step]:
        chunk = decode(event, _Chunk)
        if chunk.error is not None:
            raise failure(chunk.error)
        if chunk.details is not None:
            self.is_over, self._details = True, chunk.details
        token = chunk.token
        if token is None or token.special or not token.text:
            return []
        return [self._tally.step(token.text)]

    def end(self) -> Step | None:
        details = self._details
        if details is None:
            return None
        end = "limit" if details.finish_reason == "length" else "eos"
        return self._tally.last(end, details.input_length or 0, details.generated_tokens)  # type: ignore[arg-type]
