"""What is said through Redis: the job, the events of its log, and how both are written as bytes.

Events are array-like msgpack with a small integer tag, because one is written for every token. A Struct only grows at
its end, with defaults; a tag this build does not know reads as `Unknown`, so an old pod keeps its place in a new log.
The golden bytes of each kind stand in `tests/broker/test_messages.py`: whoever changes one breaks running systems.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal

import msgspec
from msgspec import Struct

Band = Literal["interactive", "default", "batch"]
BANDS: tuple[str, ...] = ("resume", "interactive", "default", "batch")
"""Claim order. `resume` holds jobs whose worker was lost or handed them back."""

FinishReason = Literal["stop", "length"]
Status = Literal["done", "cancelled", "failed"]


# -- the job ---------------------------------------------------------------------------------------------------------


class Message(Struct, frozen=True):
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


class Chat(Struct, frozen=True, tag="chat"):
    """A conversation, to be rendered with the model's template."""

    messages: list[Message]


class Text(Struct, frozen=True, tag="text"):
    """Plain text, tokenized as it stands."""

    text: str


class Tokens(Struct, frozen=True, tag="tokens"):
    """A prompt that is tokens already."""

    token_ids: list[int]


Prompt = Chat | Text | Tokens


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


class Job(Struct, frozen=True, omit_defaults=True):
    """One request as a worker needs it: the `spec` of the job hash.

    `max_tokens` None is "to the end of the context"; `logprobs` is how many alternatives are wanted per token, None
    for no log-probabilities at all.
    """

    id: str
    model: str
    prompt: Prompt
    max_tokens: int | None = None
    n: int = 1
    stop: list[str] = []
    sampling: Sampling = Sampling()
    logprobs: int | None = None


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


# -- the log ---------------------------------------------------------------------------------------------------------


class Tag(IntEnum):
    """The first element of an event on the wire; numbers are never reused."""

    QUEUED = 0
    CLAIMED = 1
    STARTED = 2
    DELTA = 3
    FINISHED = 4
    ENDED = 5


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


class Delta(Struct, frozen=True, array_like=True, tag=int(Tag.DELTA)):
    """What one engine step added to a choice.

    `text` is whole characters and may be empty while text is held back; `token_ids` are the step's tokens.
    """

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None


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


Event = Queued | Claimed | Started | Delta | Finished | Ended
AnyEvent = Event | Unknown


class Entry(Struct, frozen=True, array_like=True):
    """One log entry: the events of one engine step, and when, in milliseconds since the job was enqueued."""

    at_ms: int
    events: list[Event]


class ReadEntry(Struct, frozen=True):
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
_decision_decoder = msgspec.msgpack.Decoder(ScaleDecision)


def encode(message: Job | View | Entry | ScaleDecision) -> bytes:
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


def decode_view(data: bytes) -> View:
    return _view_decoder.decode(data)


def decode_decision(data: bytes) -> ScaleDecision:
    return _decision_decoder.decode(data)
