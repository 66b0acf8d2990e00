"""Server-sent events on the wire, and the JSON that may stand in them: shared by all formats that stream so.

Written by https://html.spec.whatwg.org/multipage/server-sent-events.html, and narrower where a known client is.
"""

from __future__ import annotations

import msgspec

from headrace.broker.errors import HeadraceError
from headrace.broker.messages import View

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def encode(value: object) -> bytes:
    """JSON on one line. U+2028, U+2029 and U+0085 are escaped: many line readers split there, and lose the event."""
    data = _encoder.encode(value)
    return data if data.isascii() else _escape(data)


def _escape(data: bytes) -> bytes:
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", rb"\u2028").replace(b"\xe2\x80\xa9", rb"\u2029")
    return data.replace(b"\xc2\x85", rb"\u0085")


def frame(position: str, payload: bytes) -> bytes:
    """One event; `position` comes back in `Last-Event-ID`.

    Without one there is no id line: an empty one would erase the position that the client has.
    """
    if not position:
        return b"data: %b\n\n" % payload
    return b"id: %b\ndata: %b\n\n" % (position.encode(), payload)


def heartbeat(note: str) -> bytes:
    """A comment, to be written between events.

    It ends in one newline: with a blank line after it an official SDK sees an event without data, and breaks.
    """
    return b": %b\n" % " ".join(note.split()).encode()


class SSEWire:
    """How a format that streams so stands on the wire; see `format.Format`. It says its own `envelope` of an error."""

    media_type: str = MEDIA_TYPE
    terminator: bytes = b""

    def envelope(self, error: HeadraceError) -> bytes:
        raise NotImplementedError

    frame = staticmethod(frame)

    def heartbeat(self, note: str, view: View) -> bytes:
        return heartbeat(note)

    def error_frame(self, error: HeadraceError) -> bytes:
        return self.envelope(error)

    def error_body(self, error: HeadraceError) -> bytes:
        return self.envelope(error)
