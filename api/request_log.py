"""The one line of a request, at its end: what it was, how long it took, what became of it; never what it said."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from starlette.requests import HTTPConnection

from headrace.api import requests
from headrace.api.connection import Connection
from headrace.api.stages import Stages
from headrace.broker.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.api.reply import Subject

log = logging.getLogger(__name__)

_PATH_CHARS = 80


def ended(subject: Subject, outcome: str) -> None:
    """A response about a job is over: `ok`, `accepted` (it goes on without a reader), or the word of what ended it."""
    if not log.isEnabledFor(logging.INFO):
        return
    view, duration_ms = subject.view, (time.monotonic() - subject.received_at) * 1000
    fields = {
        "request_id": subject.job_id,
        "user_request_id": view.user_request_id,
        "route": subject.route,
        "format": subject.form.name,
        "model": view.model,
        "owner": view.owner,
        "priority": view.band,
        "outcome": outcome,
        "status": subject.status,
        "stream": view.stream,
        "resumed": subject.is_resume or None,
        "replayed": subject.is_replay or None,
        "resumes": subject.resumes,
        "duration_ms": round(duration_ms, 1),
        **_stages(subject.stages),
    }
    _say(outcome, fields)


def _stages(stages: Stages) -> dict[str, Any]:
    if not stages.enqueued_ms:
        return {}
    tpot_ms = stages.tpot_ms
    return {
        "queue_ms": stages.claimed_ms,
        "ttft_ms": stages.first_ms,
        "tpot_ms": None if tpot_ms is None else round(tpot_ms, 2),
        "prompt_tokens": stages.prompt_tokens,
        "cached_tokens": stages.cached_tokens,
        "completion_tokens": stages.completion_tokens if stages.ended is not None else None,
        "attempts": stages.attempts,
    }


def refused(connection: HTTPConnection, error: HeadraceError, status: int) -> None:
    """A request that came to no job, or to none of its own."""
    if not log.isEnabledFor(logging.INFO):
        return
    route, received_at = requests.route_of(connection), Connection.of(connection.scope).received_at
    fields = {
        "request_id": error.job_id or None,
        "user_request_id": requests.user_request_id(connection),
        "route": route if route != "other" else connection.url.path[:_PATH_CHARS],
        "outcome": error.code,
        "status": status,
        "duration_ms": round((time.monotonic() - received_at) * 1000, 1),
    }
    _say(error.code, fields)


def _say(outcome: str, fields: dict[str, Any]) -> None:
    given = {name: value for name, value in fields.items() if value is not None}
    log.info("request %s", outcome, extra={"event": "request", **given})
