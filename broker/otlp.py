"""Spans as OTLP over HTTP, by OpenTelemetry's SDK; imported only when tracing is on.

Credentials of the collector, certificates and more attributes of the process come from OpenTelemetry's own variables
(`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE`, `OTEL_RESOURCE_ATTRIBUTES`, ...).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from importlib.metadata import version
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace.broker.errors import ConfigError
from headrace.broker.tracing import Context, Span

if TYPE_CHECKING:
    from headrace.broker.settings import TracingSettings

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        set_span_in_context,
    )
    from opentelemetry.trace.span import TraceState
except ImportError as error:
    raise ConfigError("tracing.endpoint: needs OpenTelemetry: pip install 'headrace[tracing]'") from error

_CLOSE_S = 1.5
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}


class _Ids(IdGenerator):
    """The ids of the next span, which are known before."""

    trace_id = 0
    span_id = 0

    def generate_span_id(self) -> int:
        return self.span_id

    def generate_trace_id(self) -> int:
        return self.trace_id


class OtlpTracer:
    """A `Tracer`. Spans go out every `export_s` from a thread; if the collector is away for long, they are dropped."""

    def __init__(self, settings: TracingSettings, service: str, instance: str) -> None:
        endpoint = settings.endpoint or ""
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        about = {"service.name": service, "service.instance.id": instance, "service.version": version("headrace")}
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # what is not to be told of never comes here
            resource=Resource.create(about),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        exporter = OTLPSpanExporter(endpoint, timeout=5)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=settings.export_s * 1000))
        self._tracer = self._provider.get_tracer("headrace", version("headrace"))
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of each try

    def tell(self, span: Span) -> None:
        self._ids.trace_id, self._ids.span_id = int(span.context.trace_id, 16), int(span.context.span_id, 16)
        above = set_span_in_context(NonRecordingSpan(_known(span.parent))) if span.parent else None
        told = self._tracer.start_span(
            span.name,
            above,
            _KINDS[span.kind],
            {name: value for name, value in span.attributes.items() if value is not None},
            [Link(_known(linked)) for linked in span.links],
            span.start_ns,
        )
        if span.error is not None:
            told.set_attribute("error.type", span.error)
            told.set_status(Status(StatusCode.ERROR, span.error))
        told.end(max(span.start_ns, span.end_ns))

    async def close(self) -> None:
        """A collector that hangs must not keep a process that ends: its thread is left behind."""
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()

        def shut() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(is_over.set)

        threading.Thread(target=shut, name="tracing's end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await is_over.wait()


def _known(context: Context) -> SpanContext:
    state = TraceState.from_header([context.state]) if context.state else None
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(context.is_sampled)),
        trace_state=state,
    )
