"""The contract between a replica's loop and what makes the tokens.

An engine gives tokens as ids and raw bytes. Text (half characters, stop strings, special tokens) is made in one place,
`workers/text.py`, so that every engine and every wire format inherits it. Steps are pushed, not awaited: an engine
calls `emit` on the event loop's thread, once per step and sequence, and no task wakes for a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import Struct

from headrace.broker.messages import Job, Result, TokenLogprob, ToolCallDelta


class Token(Struct, frozen=True, gc=False):
    """One token: its id in the model's vocabulary, its bytes (maybe part of a character), and whether it is control."""

    id: int
    piece: bytes
    is_special: bool = False


class Step(Struct, frozen=True, gc=False):
    """What one engine step added to one sequence; the last step of a sequence says why it ended.

    `eos`: the model ended it (the token that says so is not among `tokens`); `limit`: no tokens are left to make;
    `tool_calls`: it ended to have its tools called. An engine that parses the model's output itself (tools, reasoning)
    gives `text`, be it empty: then nothing is made of the tokens' pieces here, and only stop strings are looked for.
    To continue such a job an engine must be able to parse its tokens again: the log does not say which text was parsed.
    """

    tokens: Sequence[Token]
    logprobs: Sequence[TokenLogprob] | None = None
    end: Literal["eos", "limit", "tool_calls"] | None = None
    cached_tokens: int = 0
    """How many prompt tokens needed no prefill; told with the first step."""
    text: str | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCallDelta] | None = None
    untold: int = 0
    """Tokens that were made but whose ids the engine does not tell; only of parsed steps."""
    prompt_tokens: int = 0
    """How many the prompt had after all, if `encode` could only guess; only of a last parsed step."""


class Generation(Struct, frozen=True):
    """One sequence to be made: a choice of a job.

    `prompt_ids` are the prompt's tokens, `generated` those that an earlier attempt has logged: the engine continues
    after both, and makes at most `max_tokens` more (None: to the end of the context).
    """

    job: Job
    prompt_ids: list[int]
    generated: list[int]
    max_tokens: int | None
    choice: int = 0


def trace_headers(job: Job) -> dict[str, str]:
    """What tells another tracer, in a server or an engine, to which span its own belong; empty without a trace."""
    headers = {"traceparent": job.traceparent, "tracestate": job.tracestate}
    return {name: value for name, value in headers.items() if value}


class Details(Struct, frozen=True, omit_defaults=True):
    """What a model is; what its engine does not know is left at its default.

    `parameters` is their number, `size_bytes` the weights' size on disk, `context_tokens` what the model was made for,
    and `vocabulary` the number of its tokens. `bos` and `eos` are those tokens as text.
    """

    format: str = ""
    family: str = ""
    parameters: int = 0
    quantization: str = ""
    size_bytes: int = 0
    context_tokens: int = 0
    vocabulary: int = 0
    bos: str = ""
    eos: str = ""
    chat_template: str = ""
    digest: str = ""


class Capabilities(Struct, frozen=True):
    """What an engine can do, as data: it goes into the registry, see `about`.

    `constraints` are those of `json`, `grammar` and `regex` that it can keep, `embeddings` the length of its vectors
    (0: it has none), `fim` whether it can fill in text before a `suffix`. One step takes `step_tokens` of prompts in
    all (0: prompts do not wait for each other), and the cache has room for `kv_tokens` (0: for what its slots need).
    """

    slots: int
    context_tokens: int
    tools: bool = False
    constraints: tuple[str, ...] = ()
    reasoning: bool = False
    embeddings: int = 0
    fim: bool = False
    details: Details = Details()
    step_tokens: int = 0
    kv_tokens: int = 0

    def about(self) -> dict[str, str | int]:
        """For the registry, where a pod reads it without an engine, as text all of it.

        `context_tokens` and `embeddings` are numbers; `tools`, `reasoning` and `fim` are 0 or 1; `constraints` are
        words with commas between; `details` is JSON of `Details`, without what is empty.
        """
        return {
            "context_tokens": self.context_tokens,
            "tools": int(self.tools),
            "constraints": ",".join(self.constraints),
            "reasoning": int(self.reasoning),
            "embeddings": self.embeddings,
            "fim": int(self.fim),
            "details": msgspec.json.encode(self.details).decode(),
        }


class Figures(Struct, frozen=True):
    """What an engine does now, and what it has done since it began.

    `running` sequences are its batch. `kv_used` is the share of its KV cache that is in use; one that does not know
    may say its room in tokens, `kv_room`: what running sequences have is in it. `steps` have taken `step_s` seconds in
    sum; both 0 if it does not know.
    """

    running: int
    kv_used: float | None = None
    steps: int = 0
    step_s: float = 0.0
    kv_room: int = 0


class Run(Protocol):
    """A sequence that is being made."""

    def cancel(self) -> None:
        """Stop making it, at the engine's next step at the latest; nothing is emitted after this call."""
        ...


class Engine(Protocol):
    """One loaded model."""

    capabilities: Capabilities

    async def load(self, progress: Callable[[str, float], None]) -> None:
        """Load the weights and warm up; `progress` gets what is being done and its share from 0 to 1."""
        ...

    async def encode(self, job: Job) -> list[int]:
        """Render and tokenize the prompt; raises BadRequest, with `param`, for what the model cannot do."""
        ...

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        """Answer a job of another kind than `generate`: the result, and how many prompt tokens it took.

        `advance` is called as often as something is done of it: an engine that is silent for long is taken for hung.
        It is cancelled when nobody wants the answer any more. Raises BadRequest for a kind that the model cannot do.
        """
        ...

    def can_continue(self, job: Job) -> bool:
        """Whether a sequence of this job that has tokens can be gone on with exactly, from its tokens alone."""
        ...

    def token(self, token_id: int) -> Token:
        """The token of an id, as `emit` would give it."""
        ...

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        """Begin to make a sequence. `emit` gets its steps, the last with `end` set; or else `fail` is called once."""
        ...

    def figures(self) -> Figures:
        """For the metrics, asked once a second, also before `load` and after `close`: it neither waits nor raises."""
        ...

    async def check_health(self) -> None:
        """Raise EngineFailed if the engine cannot make tokens any more."""
        ...

    async def close(self) -> None: ...
