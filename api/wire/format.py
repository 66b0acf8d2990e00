"""What a wire format must do: read a request, fold a log into frames, and say errors in its own words.

A format is a fold over the log from its first entry, whoever reads: what a frame says depends on the entries before it
and on nothing else. So a reader that comes back folds from the start and drops the frames it has, and roles, indexes
and usage are the same on every pod.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from headrace.broker.errors import HeadraceError
from headrace.broker.messages import Band, Job, ReadEntry, View
from headrace.broker.settings import ApiSettings


class Parsed(Struct, frozen=True):
    """A request body, checked: the job, whose id is still to be given, and what its `View` must remember."""

    job: Job
    stream: bool
    include_usage: bool = False
    band: Band | None = None
    options: dict[str, Any] = {}
    is_background: bool = False
    """It runs also if nobody reads; without `stream` its response says only that it was taken."""
    is_kept: bool = False
    """It can be read and continued for `stored_ttl_s` after its end."""


class Fold(Protocol):
    """One reader's pass over one log, as a stream."""

    def feed(self, entry: ReadEntry) -> list[bytes]:
        """The frames that this entry makes, none or several: JSON without framing, fit to stand on one line.

        The entry that holds `Ended` makes the usage frame if one was asked for, or the format's error frame.
        """
        ...


class Whole(Protocol):
    """One reader's pass over one log, for a response in one piece."""

    def feed(self, entry: ReadEntry) -> None: ...

    def body(self) -> bytes:
        """The response, once the log has ended as `done`."""
        ...


class Format(Protocol):
    """One wire format. Its name is stored with the job, so that any pod can resume it."""

    name: str
    media_type: str
    terminator: bytes
    """What follows the last frame, framing included; empty where the last frame says it itself."""

    def parse(self, body: bytes, limits: ApiSettings) -> Parsed:
        """Read a request body, strictly; raises BadRequest with `param` naming the field."""
        ...

    def fold(self, job_id: str, view: View) -> Fold: ...

    def whole(self, job_id: str, view: View) -> Whole: ...

    def frame(self, position: str, payload: bytes) -> bytes:
        """Put one frame on the wire; `position` is what a client sends to resume after it, empty if it cannot."""
        ...

    def heartbeat(self, note: str, view: View) -> bytes:
        """What keeps an idle connection open between frames, framing included; `note` is for people."""
        ...

    def error_frame(self, error: HeadraceError) -> bytes:
        """An error after the headers: JSON without framing."""
        ...

    def error_body(self, error: HeadraceError) -> bytes:
        """An error in place of the response."""
        ...


@runtime_checkable
class OwnStatus(Protocol):
    """A format whose errors have other statuses than `errors` says."""

    def error_status(self, error: HeadraceError) -> int: ...


@runtime_checkable
class Joins(Protocol):
    """A format whose frames nobody counts: the text of several entries may go out as one."""

    joins_text: bool


def id_headers(form: Format, job_id: str) -> dict[str, str]:
    """How a response says which job it is about; a format's clients may look in a header of their own, `id_header`."""
    own: str | None = getattr(form, "id_header", None)
    return {"x-request-id": job_id, own: job_id} if own else {"x-request-id": job_id}


def can_join(form: Format) -> bool:
    return isinstance(form, Joins) and form.joins_text


def status_of(form: Format, error: HeadraceError) -> int:
    """The HTTP status of an error in a format."""
    return form.error_status(error) if isinstance(form, OwnStatus) else error.status
