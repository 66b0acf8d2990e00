"""How a record becomes a line: one line each, nothing of a user's at `info`, everything at `debug`."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.broker import logs
from headrace.broker.errors import EngineFailed

log = logging.getLogger("headrace.test")

PROMPT = "SECRET"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where loggers write, once `configure` was called; they are as they were after the test."""
    loggers = [logging.getLogger(name) for name in ("headrace", "asyncio")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield io.StringIO()
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_of_json_has_its_fields(stream: io.StringIO) -> None:
    logs.configure("info", "json", name="headrace", stream=stream)
    log.info("job %s is over", "a", extra={"event": "over", "request_id": "a", "ttft_ms": 5, "owner": None})
    [line] = lines(stream)
    at = line.pop("at")
    assert line == {
        "level": "info", "event": "over", "message": "job a is over", "logger": "headrace.test",
        "request_id": "a", "ttft_ms": 5,
    }  # fmt: skip
    assert at[10] == "T" and at.endswith("Z") and len(at) == 24


def test_a_line_of_text_has_them_too(stream: io.StringIO) -> None:
    logs.configure("info", "text", name="headrace", stream=stream)
    log.info("it is over", extra={"event": "over", "ttft_ms": 5.25, "route": "", "owner": "a b"})
    log.warning("no fields")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(" INFO    over             it is over ttft_ms=5.25 route='' owner='a b'")
    assert second.endswith(" WARNING -                no fields")


def test_what_others_write_cannot_begin_a_line(stream: io.StringIO) -> None:
    logs.configure("info", "text", name="headrace", stream=stream)
    log.info("a\n2026 ERROR\r\u2028\x1b[31m", extra={"event": "x", "route": "b\nc"})
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b" not in stream.getvalue()


def test_the_level_holds_and_a_second_set_up_replaces_the_first(stream: io.StringIO) -> None:
    logs.configure("info", "json", name="headrace", stream=io.StringIO())
    logs.configure("warning", "json", name="headrace", stream=stream)
    log.info("no")
    log.warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def fail(request_id: str | None) -> None:
    try:
        try:
            raise OSError(5, "the disk is broken")
        except OSError as error:
            raise EngineFailed("the engine is closed") from error
    except EngineFailed:
        try:
            raise ExceptionGroup(PROMPT, [ValueError(f"it was {PROMPT}")])
        except ExceptionGroup:
            log.exception("it failed", extra={"event": "failed", "request_id": request_id} if request_id else {})


@pytest.mark.parametrize("form", ["json", "text"])
def test_of_what_fails_in_a_request_the_stack_is_shown_and_not_what_it_says(
    stream: io.StringIO, form: logs.Format
) -> None:
    logs.configure("info", form, name="headrace", stream=stream)
    fail("a")
    said = stream.getvalue()
    assert PROMPT not in said
    for word in ("ValueError", "ExceptionGroup", "in fail", "the disk is broken", "the engine is closed"):
        assert word in said


@pytest.mark.parametrize(("level", "request_id"), [("debug", "a"), ("info", None)])
def test_at_debug_and_of_what_is_no_request_everything_is_shown(
    stream: io.StringIO, level: str, request_id: str | None
) -> None:
    logs.configure(level, "json", name="headrace", stream=stream)
    fail(request_id)
    assert f"it was {PROMPT}" in lines(stream)[-1]["error"]


async def test_tasks_that_nobody_awaited_say_no_more_than_their_kind(stream: io.StringIO) -> None:
    logs.configure("info", "json", name="asyncio", stream=stream)

    async def fails() -> None:
        raise ValueError(f"it was {PROMPT}")

    task = asyncio.create_task(fails())
    await asyncio.wait([task])
    del task
    gc.collect()
    [line] = lines(stream)
    assert line["message"] == "Task exception was never retrieved"
    assert "ValueError" in line["error"] and PROMPT not in stream.getvalue()


def test_objects_of_other_libraries_stay_out(stream: io.StringIO) -> None:
    logs.configure("info", "json", stream=stream, name="headrace")
    record = logging.makeLogRecord({"name": "websockets.server", "msg": "hello", "websocket": object()})
    assert json.loads(logs.JsonLines(False).format(record)).keys() == {"at", "level", "event", "message", "logger"}
