"""Anthropic's Messages API on the wire: named events, pings, and errors in its envelope.

Names and shapes are those of https://platform.claude.com/docs/en/api.
"""

from __future__ import annotations

from headrace.api.wire import sse
from headrace.broker.errors import HeadraceError, JobEnded
from headrace.broker.messages import View

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELDS = {"response_format": "output_config.format", "think": "thinking"}
"""What workers call otherwise than Anthropic does."""
_TYPE = b'{"type":"'
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def envelope(error: HeadraceError) -> bytes:
    """An error as Anthropic says it, in place of a response or in a stream.

    The envelope has no place for the field's name, so the message says it.
    """
    message, param = error.message, _FIELDS.get(error.param or "", error.param)
    if param and param not in message:
        message = f"{param}: {message}"
    return sse.encode(
        {"type": "error", "error": {"type": _type(error), "message": message}, "request_id": error.job_id}
    )


def _type(error: HeadraceError) -> str:
    """Anthropic's words; our status stays (503, not 529). That a job ended is not its reader's mistake."""
    if named := _TYPES.get(error.status):
        return named
    return "api_error" if error.status >= 500 or isinstance(error, JobEnded) else "invalid_request_error"


def envelope_of(job_id: str, error: HeadraceError) -> bytes:
    """The envelope of an error that a job ended with; it says which job."""
    error.job_id = job_id
    return envelope(error)


class AnthropicWire:
    """How its formats stand on the wire. The last event says itself that it is the last."""

    media_type: str = sse.MEDIA_TYPE
    terminator: bytes = b""
    id_header: str = "request-id"

    def frame(self, position: str, payload: bytes) -> bytes:
        """One event, named as its `type`, which stands first in every payload: clients go by the name."""
        name = payload[len(_TYPE) : payload.index(b'"', len(_TYPE))] if payload.startswith(_TYPE) else b"message"
        return b"event: %b\n%b" % (name, sse.frame(position, payload))

    def heartbeat(self, note: str, view: View) -> bytes:
        return _PING

    def error_frame(self, error: HeadraceError) -> bytes:
        return envelope(error)

    def error_body(self, error: HeadraceError) -> bytes:
        return envelope(error)
