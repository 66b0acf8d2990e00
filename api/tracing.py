"""A request's spans, as far as its pod knows them: the request itself, its admission or return, and the relaying.

Queue and engine are told of by the replica that ends the job (`workers/tracing.py`); the job carries the context there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import structs
from starlette.requests import HTTPConnection

from headrace.api.connection import Connection
from headrace.broker import tracing
from headrace.broker.errors import HeadraceError
from headrace.broker.messages import Job, View
from headrace.broker.settings import TracingSettings
from headrace.broker.tracing import Context, Span, Tracer, Value

if TYPE_CHECKING:
    from headrace.api.reply import Subject

_QUIET = ("ok", "accepted", "disconnected", "drained")
"""How a response may end that is no error of ours."""


class Trace:
    """One sampled request: its own span, and the one that it belongs to, if its client has said so."""

    def __init__(self, tracer: Tracer, context: Context, parent: Context | None, linked: Context | None = None) -> None:
        self._tracer = tracer
        self.context = context
        self._parent = parent
        self._linked = linked
        """The span of the request that made the job, if this is another one."""
        self.operation: str | None = None

    def end(self, subject: Subject, outcome: str) -> None:
        """The response is over."""
        status, now = subject.status, _Clock()
        admission = "join" if subject.is_replay else "resume" if subject.is_resume else "admit"
        self._tell(admission, now.ns(subject.received_at), now.ns(subject.made_at))
        stages = subject.stages
        if stages.ended is not None and not stages.attempts:  # no replica knows that it waited
            self._tell("queue", now.ns(subject.made_at), now.end_ns)
        if subject.began_at is not None:
            self._tell("relay", now.ns(subject.began_at), now.end_ns)
        usage = stages.ended.usage if stages.ended is not None else None
        method = "GET" if subject.is_resume and subject.route.startswith("/v1/streams") else "POST"
        attributes: dict[str, Value | None] = {
            **_http(method, subject.route, status),
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "headrace",
            "gen_ai.request.model": subject.view.model,
            "gen_ai.request.stream": subject.view.stream,
            "gen_ai.response.id": subject.job_id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens if usage else None,
            "gen_ai.usage.output_tokens": usage.completion_tokens if usage else None,
            "gen_ai.response.time_to_first_chunk": None if stages.first_ms is None else stages.first_ms / 1000,
            "headrace.user_request_id": subject.view.user_request_id,
            "headrace.format": subject.form.name,
            "headrace.priority": subject.view.band,
            "headrace.outcome": outcome,
            "headrace.attempts": stages.attempts or None,
        }
        is_error = outcome not in _QUIET and (status is None or status == 200 or status >= 500)
        self._tell_whole(f"{method} {subject.route}", now.ns(subject.received_at), now.end_ns, attributes, is_error)

    def refuse(self, request: HTTPConnection, route: str, error: HeadraceError, status: int) -> None:
        """The request came to no job."""
        now, method = _Clock(), str(request.scope.get("method", "GET"))
        received_ns = now.ns(Connection.of(request.scope).received_at)
        attributes = {**_http(method, route, status), "headrace.outcome": error.code}
        self._tell_whole(f"{method} {route}", received_ns, now.end_ns, attributes, status >= 500)

    def _tell(self, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.tell(Span(name, self.context.child(), start_ns, end_ns, self.context))

    def _tell_whole(
        self, name: str, start_ns: int, end_ns: int, attributes: dict[str, Value | None], is_error: bool
    ) -> None:
        links = [self._linked] if self._linked is not None else []
        error = str(attributes["headrace.outcome"]) if is_error else None
        span = Span(name, self.context, start_ns, end_ns, self._parent, "server", attributes, links, error)
        self._tracer.tell(span)


class _Clock:
    """Now, and what `time.monotonic` said, both in epoch nanoseconds."""

    def __init__(self) -> None:
        self.end_ns = time.time_ns()
        self._offset_ns = self.end_ns - time.monotonic_ns()

    def ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


class Tracing:
    """What a pod begins the traces of requests with; there is none if tracing is off."""

    def __init__(self, settings: TracingSettings, tracer: Tracer) -> None:
        self._settings = settings
        self.tracer = tracer

    def parent(self, request: HTTPConnection) -> Context | None:
        """What the client says that its request belongs to."""
        text = request.headers.get("traceparent") if self._settings.follow_clients else None
        return tracing.parse(text, request.headers.get("tracestate", "")) if text else None

    def stamp(self, request: HTTPConnection, job: Job, view: View) -> tuple[Trace | None, Job, View]:
        """A new job with what a replica needs to go on with its trace; a trace that its client has not sampled goes
        on unsampled, so that no engine begins one of its own."""
        parent = self.parent(request)
        trace = self.begin(parent)
        carried = trace.context if trace is not None else parent
        if carried is None:
            return None, job, view
        job = structs.replace(job, traceparent=carried.traceparent, tracestate=carried.state)
        if trace is not None:
            trace.operation = tracing.operation(job)
            view = structs.replace(view, traceparent=carried.traceparent)
        return trace, job, view

    def begin(self, parent: Context | None, of: View | None = None) -> Trace | None:
        """The trace of a request, None if it is not sampled; one about the job of a traced request (`of`) is, unless
        its own client says no."""
        made_by = tracing.parse(of.traceparent) if of is not None and of.traceparent else None
        is_linked = made_by is not None and made_by.is_sampled
        if parent is None and is_linked:
            context: Context | None = tracing.new_root()
        else:
            context = tracing.begun(self._settings, parent)
        return Trace(self.tracer, context, parent, made_by if is_linked else None) if context is not None else None


def _http(method: str, route: str, status: int | None) -> dict[str, Value | None]:
    return {"http.request.method": method, "http.route": route, "http.response.status_code": status}
