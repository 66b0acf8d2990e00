"""The spans of a job's attempts: how long it waited, what the engine did, and which attempt followed which.

The replica that settles a job tells of all its attempts. What it has not done itself it knows from the log, which it
had to read anyhow: so an attempt whose worker was killed has its span too, and none has two.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from headrace.broker import keys, tracing
from headrace.broker.messages import Claimed, Delta, Ended, FinishReason, Job, ReadEntry, Result, Started, Usage
from headrace.broker.protocol import Claim
from headrace.broker.tracing import Context, Kind, Span, Tracer, Value


class Former(Struct):
    """An attempt of another worker, in milliseconds since the job was enqueued; None for what it did not come to."""

    number: int
    worker: str
    claimed_ms: int
    started_ms: int | None = None
    first_ms: int | None = None
    last_ms: int = 0


class Traces:
    """What a replica traces with; none if tracing is off. `engine` is the provider, in OpenTelemetry's word."""

    def __init__(self, tracer: Tracer, replica: str, engine: str) -> None:
        self.tracer = tracer
        self.replica = replica
        self.engine = engine

    def attempt(self, claim: Claim) -> AttemptTrace | None:
        """The trace of an attempt, None if its request is not sampled."""
        parent = tracing.of_job(claim.job)
        return AttemptTrace(self, claim, parent) if parent is not None and parent.is_sampled else None


class Untraced:
    """What a job that is not sampled has in place of an `AttemptTrace`."""

    def note(self, entry: ReadEntry) -> None: ...

    def started(self) -> None: ...

    def end(self, ended: Ended, first_token_at: float | None, reasons: Sequence[FinishReason | None]) -> None: ...


class AttemptTrace(Untraced):
    """One attempt of a sampled job, and what its log says of those before."""

    def __init__(self, traces: Traces, claim: Claim, parent: Context) -> None:
        self._traces = traces
        self._claim = claim
        self._parent = parent
        self._context = tracing.attempt(parent, claim.job.id, claim.attempt)
        self._former: list[Former] = []
        self._claimed_ns = time.time_ns()
        self._enqueued_ns = self._claimed_ns - claim.waited_ms * 1_000_000
        self._started_ns: int | None = None
        self.job: Job = structs.replace(
            claim.job, traceparent=self._context.traceparent, tracestate=self._context.state
        )
        """The job as the engine is to see it: what the engine traces belongs to this attempt."""

    def note(self, entry: ReadEntry) -> None:
        """An entry of an earlier attempt, in the log's order."""
        for event in entry.events:
            if isinstance(event, Claimed):
                self._former.append(Former(keys.position(entry.id)[0], event.worker, entry.at_ms))
        if not self._former:
            return
        former = self._former[-1]
        former.last_ms = entry.at_ms
        for event in entry.events:
            if isinstance(event, Started):
                former.started_ms = entry.at_ms
            elif isinstance(event, Delta | Result) and former.first_ms is None:
                former.first_ms = entry.at_ms

    def started(self) -> None:
        """The engine has accepted the prompt."""
        self._started_ns = time.time_ns()

    def end(self, ended: Ended, first_token_at: float | None, reasons: Sequence[FinishReason | None]) -> None:
        """The job has ended here. `first_token_at` is monotonic seconds."""
        end_ns, usage = time.time_ns(), ended.usage or Usage(0, 0)
        first_ns = None if first_token_at is None else end_ns - int((time.monotonic() - first_token_at) * 1e9)
        waited_from_ns, links = self._enqueued_ns, list[Context]()
        for former in self._former:
            if former.number == self._claim.attempt:
                continue
            context = self._tell_former(former, waited_from_ns, links)
            waited_from_ns, links = self._ns(former.last_ms), [context]
        self._wait(waited_from_ns, self._claimed_ns, self._claim.attempt)
        self._stages(self._context, self._claimed_ns, self._started_ns, first_ns, end_ns)
        attributes = {
            **self._about(self._claim.attempt, self._traces.replica),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.response.finish_reasons": [reason for reason in reasons if reason] or None,
            "headrace.outcome": ended.error.code if ended.error else ended.status,
        }
        error = ended.error.code if ended.status == "failed" and ended.error else None
        self._tell_attempt(self._context, self._claimed_ns, end_ns, attributes, links, error)

    def _tell_former(self, former: Former, waited_from_ns: int, links: list[Context]) -> Context:
        context = tracing.attempt(self._parent, self._claim.job.id, former.number)
        claimed_ns, last_ns = self._ns(former.claimed_ms), self._ns(former.last_ms)
        self._wait(waited_from_ns, claimed_ns, former.number)
        started_ns = None if former.started_ms is None else self._ns(former.started_ms)
        first_ns = None if former.first_ms is None else self._ns(former.first_ms)
        self._stages(context, claimed_ns, started_ns, first_ns, last_ns)
        attributes = {**self._about(former.number, former.worker), "headrace.outcome": "handed_over"}
        self._tell_attempt(context, claimed_ns, last_ns, attributes, links, "handed_over")
        return context

    def _ns(self, at_ms: int) -> int:
        return self._enqueued_ns + at_ms * 1_000_000

    def _about(self, number: int, worker: str) -> Mapping[str, Value | None]:
        job, sampling = self._claim.job, self._claim.job.sampling
        return {
            "gen_ai.operation.name": tracing.operation(job),
            "gen_ai.provider.name": self._traces.engine,
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": job.id,
            "gen_ai.request.max_tokens": job.max_tokens,
            "gen_ai.request.choice.count": job.n if job.n > 1 else None,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
            "gen_ai.request.presence_penalty": sampling.presence_penalty,
            "headrace.attempt": number,
            "headrace.worker": worker,
        }

    def _wait(self, start_ns: int, end_ns: int, number: int) -> None:
        attributes = {"headrace.attempt": number}
        self._tell(Span("queue", self._parent.child(), start_ns, end_ns, self._parent, attributes=attributes))

    def _stages(self, above: Context, claimed: int, started: int | None, first: int | None, end: int) -> None:
        """What an attempt consists of, as far as it came; a stage that was cut ends with the attempt."""
        times = [("dispatch", claimed), ("prefill", started), ("decode", first)]
        begun = [(name, at) for name, at in times if at is not None]
        ends = [*(at for _, at in begun[1:]), end]
        for (name, at), until in zip(begun, ends, strict=True):
            self._tell(Span(name, above.child(), at, until, above))

    def _tell_attempt(
        self,
        context: Context,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, Value | None],
        links: list[Context],
        error: str | None,
    ) -> None:
        name = f"{attributes['gen_ai.operation.name']} {self._claim.job.model}"
        kind: Kind = "client" if self._traces.engine == "remote" else "internal"
        self._tell(Span(name, context, start_ns, end_ns, self._parent, kind, attributes, links, error))

    def _tell(self, span: Span) -> None:
        self._traces.tracer.tell(span)
