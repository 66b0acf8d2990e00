"""Spans of a request over all processes that touch it, in the words of W3C Trace Context and OpenTelemetry.

A span is told when it is over, as a whole: nothing is open in between, and nothing is done per token. Its id is known
before: of an attempt it is a function of job and attempt, so that a successor can tell of an attempt whose worker was
killed, and link to it. Off by default: then there is no `Tracer`, and a request costs one comparison in each process.
"""

from __future__ import annotations

import hashlib
import random
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from headrace.broker.messages import Chat, Job

if TYPE_CHECKING:
    from headrace.broker.settings import TracingSettings

Kind = Literal["internal", "server", "client"]

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_CHARS = 512

Value = str | bool | int | float | Sequence[str]


class Context(NamedTuple):
    """Where a span is: its trace, its own id (both hex), whether it is told of, and the vendors' `tracestate`."""

    trace_id: str
    span_id: str
    is_sampled: bool = True
    state: str = ""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02d}"

    def child(self, span_id: str | None = None) -> Context:
        """A span below this one; with a new id if none is given."""
        return self._replace(span_id=span_id or secrets.token_hex(8))


class Span(NamedTuple):
    """What happened, from when to when (epoch nanoseconds). `error` says that it failed, in one word of ours."""

    name: str
    context: Context
    start_ns: int
    end_ns: int
    parent: Context | None = None
    kind: Kind = "internal"
    attributes: Mapping[str, Value | None] = {}  # read only
    links: Sequence[Context] = ()
    error: str | None = None


class Tracer(Protocol):
    """What a process tells its spans to."""

    def tell(self, span: Span) -> None:
        """Send it some time; never waits, and drops what it cannot hold."""
        ...

    async def close(self) -> None:
        """Send what is left, but do not wait long for it."""
        ...


def opened(settings: TracingSettings, service: str, instance: str) -> Tracer | None:
    """The tracer of a process, None if tracing is off; raises ConfigError if what it needs is not installed."""
    if settings.endpoint is None:
        return None
    from headrace.broker.otlp import OtlpTracer

    return OtlpTracer(settings, service, instance)


def parse(traceparent: str, tracestate: str = "") -> Context | None:
    """Read both headers; None if the first is missing or wrong. What cannot be kept of the second is dropped."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None or (traceparent.startswith("00") and found[4]):
        return None
    state = tracestate if len(tracestate) <= _STATE_CHARS and tracestate.isascii() and tracestate.isprintable() else ""
    return Context(found[1], found[2], bool(int(found[3], 16) & 1), state)


def begun(settings: TracingSettings, parent: Context | None) -> Context | None:
    """The context of a new span: sampled as its parent is, or by chance if it has none; None if it is not sampled."""
    if parent is not None:
        return parent.child() if parent.is_sampled else None
    if random.random() >= settings.sample_ratio:
        return None
    return new_root()


def new_root() -> Context:
    """The first span of a trace of its own."""
    return Context(secrets.token_hex(16), secrets.token_hex(8))


def of_job(job: Job) -> Context | None:
    """What the pod that admitted a job has said of its trace."""
    return parse(job.traceparent, job.tracestate) if job.traceparent else None


def attempt(parent: Context, job_id: str, number: int) -> Context:
    """The span of an attempt, which everybody can name who knows the job."""
    return parent.child(hashlib.blake2b(f"{job_id}.{number}".encode(), digest_size=8).hexdigest())


def operation(job: Job) -> str:
    """`gen_ai.operation.name`: one of the convention's where it has one, else our own word."""
    if job.kind == "generate":
        return "chat" if isinstance(job.prompt, Chat) else "text_completion"
    return "embeddings" if job.kind == "embed" else job.kind
