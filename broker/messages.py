"""What is said through Redis: the job, the events of its log, and how both are written as bytes.

Events are array-like msgpack with a small integer tag, because one is written for every token. A Struct only grows at
its end, with defaults; a tag this build does not know reads as `Unknown`, so an old pod keeps its place in a new log.
The golden bytes of each kind stand in `tests/broker/test_messages.py`: whoever changes one breaks running systems.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal

import msgspec
from msgspec import Struct

Band = Literal["interactive", "default", "batch"]
BANDS: tuple[str, ...] = ("resume", "interactive", "default", "batch")
"""Claim order. `resume` holds jobs whose worker was lost or handed them back."""

Kind = Literal["generate", "embed", "tokenize", "detokenize", "render", "count"]
"""What a job asks for; every kind but `generate` is answered by one `Result`."""

FinishReason = Literal["stop", "length", "tool_calls"]
Status = Literal["done", "cancelled", "failed"]


# -- the job ---------------------------------------------------------------------------------------------------------


class ToolCall(Struct, frozen=True):
    """A call that the model made in an earlier turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation; `role` is `system`, `user`, `assistant` or `tool`.

    `tool_call_id` and `name` say which call a `tool` turn answers; `reasoning` is what an assistant turn thought.
    """

    role: str
    content: str
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None


class Chat(Struct, frozen=True, omit_defaults=True, tag="chat"):
    """A conversation, to be rendered with the model's template.

    `is_open`: the last turn is the assistant's and unfinished; the answer goes on in its middle.
    """

    messages: list[Message]
    is_open: bool = False


class Text(Struct, frozen=True, tag="text"):
    """Plain text, tokenized as it stands."""

    text: str


class Tokens(Struct, frozen=True, tag="tokens"):
    """A prompt that is tokens already."""

    token_ids: list[int]


class Batch(Struct, frozen=True, tag="batch"):
    """Several inputs of one job, answered together and in order; only `embed` takes it."""

    inputs: list[Text | Tokens]


Prompt = Chat | Text | Tokens | Batch


class Tool(Struct, frozen=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class JsonObject(Struct, frozen=True, tag="json_object"):
    """The answer must be some JSON object."""


class JsonSchema(Struct, frozen=True, tag="json_schema"):
    """The answer must be JSON by this schema."""

    schema: dict[str, Any]


class Grammar(Struct, frozen=True, tag="grammar"):
    """The answer must be a sentence of this grammar, in llama.cpp's GBNF."""

    gbnf: str


class Regex(Struct, frozen=True, tag="regex"):
    """The whole answer must match this pattern."""

    pattern: str


Constraint = JsonObject | JsonSchema | Grammar | Regex
ToolChoice = Literal["auto", "none", "required"]


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen; None means the engine's default, 0 means 0."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None


class Job(Struct, frozen=True, omit_defaults=True):
    """One request as a worker needs it: the `spec` of the job hash.

    `max_tokens` None is "to the end of the context"; `logprobs` is how many alternatives are wanted per token, None
    for no log-probabilities at all. `tool_name` narrows `tool_choice` `required` to one tool. `think` None leaves it to
    the model whether it reasons first. `suffix` is what follows the text to be filled in. `add_special` puts the
    vocabulary's own tokens (BOS) around what is tokenized, for the kind `tokenize`. `stream` is for the metrics only:
    its client gets tokens as they come.
    """

    id: str
    model: str
    prompt: Prompt
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = []
    sampling: Sampling = Sampling()
    logprobs: int | None = None
    kind: Kind = "generate"
    tools: list[Tool] = []
    tool_choice: ToolChoice = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool | None = None
    constraint: Constraint | None = None
    think: bool | None = None
    ignore_eos: bool = False
    suffix: str | None = None
    add_special: bool = False
    traceparent: str = ""
    """The span that all of this belongs to, as W3C's header says it, and `tracestate`; empty if it is not traced."""
    tracestate: str = ""
    stream: bool = False


class View(Struct, frozen=True, omit_defaults=True):
    """One request as a relay needs it: who may read it, and in which format it began. It outlives the spec."""

    owner: str
    model: str
    format: str
    band: Band = "default"
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    user_request_id: str | None = None
    fingerprint: str = ""
    """SHA-256 of the body in hex, if the request had an idempotency key."""
    options: dict[str, Any] = {}
    """What the format itself must remember to write its frames; nobody else reads it."""
    traceparent: str = ""
    """The job's, if it is traced: who reads it later links to it."""


# -- the log ---------------------------------------------------------------------------------------------------------


class Tag(IntEnum):
    """The first element of an event on the wire; numbers are never reused."""

    QUEUED = 0
    CLAIMED = 1
    STARTED = 2
    DELTA = 3
    FINISHED = 4
    ENDED = 5
    RESULT = 6


class Queued(Struct, frozen=True, array_like=True, tag=int(Tag.QUEUED)):
    """First event of every log; `enqueued_ms` is the broker's clock, epoch milliseconds."""

    enqueued_ms: int


class Claimed(Struct, frozen=True, array_like=True, tag=int(Tag.CLAIMED)):
    """A replica opened this attempt; `after` is the id of the entry it continues from."""

    worker: str
    after: str


class Started(Struct, frozen=True, array_like=True, tag=int(Tag.STARTED)):
    """The engine accepted the prompt."""

    prompt_tokens: int
    cached_tokens: int = 0


class Alternative(Struct, frozen=True, array_like=True):
    """A token that could have stood here, with its natural-log probability."""

    token_id: int
    piece: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The chosen token's natural-log probability, and the best alternatives (the chosen one is often among them)."""

    token_id: int
    piece: bytes
    logprob: float
    top: list[Alternative] = []


class ToolCallDelta(Struct, frozen=True, array_like=True):
    """More of one tool call: `id` and `name` come with its first delta, `arguments` is the next JSON text."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Delta(Struct, frozen=True, array_like=True, gc=False, tag=int(Tag.DELTA)):
    """What one engine step added to a choice.

    `text` is whole characters and may be empty while text is held back; `token_ids` are the step's tokens.
    `reasoning` is text of the model's thinking, and `tool_calls` what it calls: both as its engine has parsed them.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class Result(Struct, frozen=True, array_like=True, tag=int(Tag.RESULT)):
    """The whole answer of a job that generates nothing. `data` is a mapping, by kind:

    `embed`: `embeddings`, a list of little-endian float32 bytes, and `tokens`, the token count of each input;
    `tokenize`: `tokens` (ids) and `pieces` (their bytes); `detokenize` and `render`: `text`; `count`: `tokens`,
    a number.
    """

    data: dict[str, Any]


class Finished(Struct, frozen=True, array_like=True, tag=int(Tag.FINISHED)):
    """A choice is complete; `stop` is the stop string that ended it, if one did."""

    choice: int
    reason: FinishReason
    stop: str | None = None


class Failure(Struct, frozen=True, array_like=True):
    """Why a job did not finish: `code` of an error in `errors`, and a message that is fit for the caller."""

    code: str
    message: str = ""
    param: str | None = None


class Usage(Struct, frozen=True, array_like=True):
    """Tokens of the whole job, over all choices and attempts; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(Struct, frozen=True, array_like=True):
    """Milliseconds of the last attempt: waiting, until its first token, from there to its last."""

    queue_ms: int
    prefill_ms: int
    decode_ms: int


class Ended(Struct, frozen=True, array_like=True, tag=int(Tag.ENDED)):
    """The one terminal event, and the last entry of its log."""

    status: Status
    error: Failure | None = None
    usage: Usage | None = None
    timings: Timings | None = None


class Unknown(Struct, frozen=True):
    """An event of a kind that this build does not know; it keeps its place and makes no frame."""

    tag: object


Event = Queued | Claimed | Started | Delta | Finished | Ended | Result
AnyEvent = Event | Unknown


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One log entry: the events of one engine step, and when, in milliseconds since the job was enqueued."""

    at_ms: int
    events: list[Event]


class ReadEntry(Struct, frozen=True, gc=False):
    """An `Entry` as a reader sees it: with its position, and with unknown events kept."""

    id: str
    at_ms: int
    events: list[AnyEvent]

    @property
    def is_end(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Ended)


class _RawEntry(Struct, frozen=True, array_like=True):
    at_ms: int
    events: list[msgspec.Raw]


class ScaleDecision(Struct, frozen=True):
    """What an autoscaler decided for a model, and what it saw. `direction` is up, down or hold.

    `is_advice` says that it was not acted on.
    """

    at_ms: int
    before: int
    target: int
    direction: Literal["up", "down", "hold"]
    reason: str
    wanted: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    oldest_ms: int = 0
    running: int = 0
    ready: int = 0
    starting: int = 0
    is_advice: bool = False

    def is_news_after(self, last: ScaleDecision) -> bool:
        """Whether it belongs in the log: it changes something, or says something else than the last one kept."""
        is_change = self.direction != "hold" and not self.is_advice
        return is_change or (self.target, self.reason) != (last.target, last.reason)


_encoder = msgspec.msgpack.Encoder()
_entry_decoder = msgspec.msgpack.Decoder(Entry)
_event_decoder = msgspec.msgpack.Decoder(Event)
_raw_entry_decoder = msgspec.msgpack.Decoder(_RawEntry)
_job_decoder = msgspec.msgpack.Decoder(Job)
_view_decoder = msgspec.msgpack.Decoder(View)
_usage_decoder = msgspec.msgpack.Decoder(Usage)
_decision_decoder = msgspec.msgpack.Decoder(ScaleDecision)


def encode(message: Job | View | Entry | Usage | ScaleDecision) -> bytes:
    """The bytes that are stored."""
    return _encoder.encode(message)


def decode_entry(entry_id: str, data: bytes) -> ReadEntry:
    """Read an entry of any build; raises `msgspec.DecodeError` if it is not one."""
    try:
        entry = _entry_decoder.decode(data)
    except msgspec.ValidationError:
        raw = _raw_entry_decoder.decode(data)
        return ReadEntry(entry_id, raw.at_ms, [_decode_event(event) for event in raw.events])
    return ReadEntry(entry_id, entry.at_ms, entry.events)  # type: ignore[arg-type]  # list[Event] is read only here


def _decode_event(raw: msgspec.Raw) -> AnyEvent:
    try:
        return _event_decoder.decode(raw)
    except msgspec.ValidationError:
        fields = msgspec.msgpack.decode(raw)
        return Unknown(fields[0] if isinstance(fields, list) and fields else fields)


def decode_job(data: bytes) -> Job:
    return _job_decoder.decode(data)


def decode_usage(data: bytes) -> Usage:
    return _usage_decoder.decode(data)


def decode_view(data: bytes) -> View:
    return _view_decoder.decode(data)


def decode_decision(data: bytes) -> ScaleDecision:
    return _decision_decoder.decode(data)
