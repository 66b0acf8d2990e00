"""How every process of ours logs: one line an event, as text for people or as JSON for machines.

Called by entry points only. A line has a stable `event` word, a sentence, and the fields that its caller put into
`extra`; `request_id` among them is the job's id, as in `X-Request-Id`. At `info` and above no line shows anything that
a user wrote: the message of an exception may quote it, so of what fails in a request, or in a library that tells of it
itself, only the kind and the stack are shown, and the message at `debug`.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TextIO

import msgspec

from headrace.broker.errors import HeadraceError

Format = Literal["text", "json"]

_OURS = "headrace."
_NOISY = ("httpx", "httpcore", "uvicorn.access")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "event"}
"""What a record has without `extra`; those who call us give the rest."""
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, 0x85)} | {10: "\\n", 0x2028: "\\u2028"}
"""What would begin another line, or tell a terminal something."""


def configure(level: str, form: Format, *, name: str = "", stream: TextIO | None = None) -> None:
    """Log everything from `level` on to `stream` (default: stderr), in place of what was set up before.

    `name` narrows it to the loggers below, where the process belongs to others (a Ray worker's).
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    is_open = level == "debug"
    handler.setFormatter(JsonLines(is_open) if form == "json" else TextLines(is_open))
    logger = logging.getLogger(name or None)
    for old in logger.handlers[:]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = not name
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def fields_of(record: logging.LogRecord) -> Mapping[str, Any]:
    """What the caller said besides the sentence; other libraries put objects of theirs into their records."""
    if not record.name.startswith(_OURS):
        return {}
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD and value is not None}


class _Lines(logging.Formatter):
    """What both forms share. `is_open`: messages of exceptions may be shown."""

    def __init__(self, is_open: bool) -> None:
        super().__init__()
        self._is_open = is_open

    def _said(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.name == "asyncio" and not self._is_open:
            return message.partition("\n")[0]  # what follows are tasks and handles, with what their exceptions say
        return message

    def _error(self, record: logging.LogRecord) -> str:
        """The traceback of a record, or nothing; without what the exceptions say if it may be about a request."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return ""
        if self._is_open or (record.name.startswith(_OURS) and "request_id" not in record.__dict__):
            return "".join(traceback.format_exception(error)).rstrip()
        return "\n".join(_closed(error, set())).rstrip()


def _closed(error: BaseException, seen: set[int]) -> Iterator[str]:
    """An exception and what led to it: stacks and kinds, and messages only where they are the system's or ours."""
    seen.add(id(error))
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and id(before) not in seen:
        yield from _closed(before, seen)
        yield "\nwhich led to:\n"
    yield "".join(traceback.format_tb(error.__traceback__)).rstrip()
    is_known = isinstance(error, OSError) or (isinstance(error, HeadraceError) and error.status >= 500)
    yield f"{type(error).__qualname__}: {error if is_known else '(its message is shown at log_level debug)'}"
    for member in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        yield from _closed(member, seen)


class TextLines(_Lines):
    """Time, level, event, sentence, and the fields as `key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        event = record.__dict__.get("event", "-")
        line = f"{self.formatTime(record)} {record.levelname:<7} {event:<16} {self._said(record)}"
        line += "".join(f" {key}={_plain(value)}" for key, value in fields_of(record).items())
        error = self._error(record)
        line = line if line.isprintable() else line.translate(_CONTROL)
        return line + (f"\n{error}" if error else "")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}".rstrip("0").rstrip(".")
    text = str(value)
    return text if text and " " not in text else repr(text)


class JsonLines(_Lines):
    """One object a line: `at` (UTC), `level`, `event`, `message`, `logger`, the fields, and `error` for a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "at": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.__dict__.get("event", "-"),
            "message": self._said(record),
            "logger": record.name,
            **fields_of(record),
        }
        if error := self._error(record):
            said["error"] = error
        return msgspec.json.encode(said, enc_hook=str).decode()
