"""A collector of spans: it takes OTLP over HTTP as OpenTelemetry's own would, and keeps what it was told."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import opentelemetry.proto.collector.trace.v1.trace_service_pb2 as wire


@dataclass(frozen=True)
class Told:
    """One span as it came. `service` is the process it is of; ids are hex, times epoch milliseconds."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent: str
    kind: int
    start_ms: float
    end_ms: float
    attributes: dict[str, Any]
    links: list[tuple[str, str]]
    is_error: bool
    state: str


class Collector:
    """`with Collector() as collector:` listens on `url`."""

    def __init__(self) -> None:
        self.spans: list[Told] = []
        self.paths: list[str] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.take(self.path, body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        self.paths.append(path)
        request = wire.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_told(span, service) for span in scope.spans]

    def named(self, name: str) -> list[Told]:
        """The spans of a name, in the order in which they began."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ms)

    def one(self, name: str) -> Told:
        [span] = self.named(name)
        return span

    def tree(self) -> list[str]:
        """All spans by their begin, each with as many dots before it as it has spans above it."""
        above = {span.span_id: span.parent for span in self.spans}

        def depth(span_id: str) -> int:
            return 1 + depth(above[span_id]) if above.get(span_id) in above else 0

        ordered = sorted(self.spans, key=lambda span: (span.start_ms, depth(span.span_id), span.end_ms))
        return [f"{'.' * depth(span.span_id)}{span.name}" for span in ordered]


def _told(span: Any, service: str) -> Told:
    return Told(
        span.name,
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.start_time_unix_nano / 1e6,
        span.end_time_unix_nano / 1e6,
        {each.key: _value(each.value) for each in span.attributes},
        [(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        span.status.code == 2,
        span.trace_state,
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
