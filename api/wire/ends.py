"""How a log ended, in words that formats share."""

from __future__ import annotations

from collections.abc import Callable

from headrace.api.wire.format import Whole
from headrace.broker.errors import Cancelled, EngineFailed, HeadraceError, from_failure
from headrace.broker.messages import Ended, ReadEntry


def error_of(ended: Ended) -> HeadraceError:
    """The error of a job that is not `done`."""
    if ended.error is None:
        return Cancelled() if ended.status == "cancelled" else EngineFailed()
    return from_failure(ended.error.code, ended.error.message, ended.error.param)


class OneFrame:
    """A stream of a format that answers in one piece: one frame, which is its body; see `format.Fold`."""

    def __init__(self, whole: Whole, envelope: Callable[[HeadraceError], bytes]) -> None:
        self._whole = whole
        self._envelope = envelope

    def feed(self, entry: ReadEntry) -> list[bytes]:
        self._whole.feed(entry)
        match entry.events[-1:]:
            case [Ended() as ended]:
                return [self._last(ended)]
        return []

    def _last(self, ended: Ended) -> bytes:
        try:
            return self._whole.body() if ended.status == "done" else self._envelope(error_of(ended))
        except HeadraceError as error:  # what was answered is not what was asked for
            return self._envelope(error)
