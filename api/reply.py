"""The response to one reader of a log, in one piece; and what it shares with the one in many, `relay.StreamReply`.

A client that leaves ends its reader, nothing else; what its leaving means for the job, the reading leases say.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api import request_log
from headrace.api.carrier import leave
from headrace.api.connection import Connection
from headrace.api.first_token import FirstToken
from headrace.api.pod import Pod
from headrace.api.stages import Stages
from headrace.api.tracing import Trace
from headrace.api.wire.format import Format, id_headers, status_of
from headrace.broker import errors, metrics
from headrace.broker.errors import BodyTooLarge, HeadraceError, JobEnded
from headrace.broker.messages import Ended, ReadEntry, View
from headrace.broker.tail import Reader

_SAFE = "/:@+, "
"""Of a model's name in a header; what is not ASCII is percent-encoded."""

log = logging.getLogger(__name__)


class ClientGone(HeadraceError):
    """The client has left."""

    code = "disconnected"


class Subject:
    """What a response is about: a job, as one reader of it sees it."""

    def __init__(  # noqa: PLR0913  # what is read, for whom, and how
        self,
        pod: Pod,
        job_id: str,
        view: View,
        form: Format,
        route: str,
        grace_ms: int | None,
        coalesce_s: float = 0.0,
    ) -> None:
        self.pod = pod
        self.job_id = job_id
        self.view = view
        self.form = form
        self.route = route
        self.grace_ms = grace_ms
        """What this reader's leaving means, if it said so; None is what was said at admission."""
        self.coalesce_s = coalesce_s
        """Frames wait this long for others to go out with."""
        self.is_replay = False
        """It joins a job that an earlier request with the same idempotency key has made."""
        self.headers: dict[str, str] = {}
        """What the response says beside what every one does."""
        self.is_resume = False
        """Its reader has come back, or is another one."""
        self.resumes = 0
        """How many readers the job has had after its first, up to this one."""
        self.status: int | None = None
        """What its response began with; None if there is none, or not over HTTP."""
        self.started_at = self.received_at = self.made_at = time.monotonic()
        """When the request was here whole, when its first byte was, and when it had come to its job."""
        self.began_at: float | None = None
        """When its response began."""
        self.stages = Stages()
        self.trace: Trace | None = None
        self.first_token: FirstToken | None = None
        """Of a job that this request has made, until it has been written."""

    def time(self, accepted_at: float) -> None:
        """The request was here, whole, at this time, and its job has just been admitted."""
        self.started_at = accepted_at
        self.first_token = FirstToken(accepted_at)

    def count(self, outcome: str) -> None:
        duration_s = time.monotonic() - self.started_at
        metrics.REQUESTS.labels(self.route, self.view.model, outcome).inc()
        metrics.REQUEST_DURATION.labels(self.view.model, self.route, outcome).observe(duration_s)
        request_log.ended(self, outcome)
        if self.trace is not None:
            self.trace.end(self, outcome)


class Reply(Response):
    """What both kinds of response share: they notice that the client leaves, and they leave the log tidily."""

    def __init__(self, subject: Subject, reader: Reader) -> None:
        super().__init__()
        self.subject = subject
        self.reader = reader
        self.outcome = ClientGone.code
        self.connection = Connection()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not leave(scope, partial(self.serve, scope, receive, send)):
            await self.serve(scope, receive, send)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond, until the end or until the client leaves."""
        subject, gauge = self.subject, metrics.STREAMS_OPEN.labels(self.subject.route)
        gauge.inc()
        self.connection = Connection.of(scope)
        watcher: asyncio.Task[None] | None = None
        try:
            self.connection.when_half_closed(self.on_half_closed)
            if self.connection.can_tell_lost():
                self.connection.when_lost(self._on_lost)
            else:
                watcher = asyncio.create_task(self._watch_client(receive), name="watch client")
            await self.respond(send)
        except ClientGone:
            pass
        except Exception as error:  # a bug: no layer is left to answer it
            said = {"event": "request_failed", "request_id": subject.job_id}
            log.error("job %s: its response failed", subject.job_id, exc_info=error, extra=said)
            await self.give_up(send)
        except asyncio.CancelledError:
            if not subject.pod.is_draining:
                raise
            await self._cut_off()
        finally:
            if watcher is not None:
                watcher.cancel()
            gauge.dec()
            self.connection.forget()
            self.reader.sink = None
            subject.pod.tail.close_reader(self.reader, subject.grace_ms)
            subject.count(self.outcome)

    async def give_up(self, send: Send) -> None:
        """End a response that cannot be made."""
        await self.refuse(send, HeadraceError())

    async def _cut_off(self) -> None:
        """The pod ends, not the client: no terminator, so that it resumes elsewhere, and its reading lease runs on."""
        self.outcome = "drained"
        self.subject.pod.tail.abandon(self.reader)
        self.connection.abort()
        await asyncio.sleep(0)  # the server learns of the abort, and does not miss the end of the response

    async def respond(self, send: Send) -> None:
        raise NotImplementedError

    def on_half_closed(self) -> None:
        """The client has closed its writing side, which most mean as leaving."""
        self.connection.abort()

    async def _watch_client(self, receive: Receive) -> None:
        """Wait until the client leaves. A body that nobody asked for is dropped, up to what any body may have."""
        left = self.subject.pod.settings.api.max_body_bytes
        while (message := await receive())["type"] != "http.disconnect":
            left -= len(message.get("body", b""))
            if left < 0:
                self.reader.fail(BodyTooLarge())
                return
        self._on_lost()

    def _on_lost(self) -> None:
        self.reader.fail(ClientGone())

    async def refuse(self, send: Send, error: HeadraceError) -> None:
        """The error in place of the response, with its own status."""
        self.outcome, error.job_id = error.code, self.subject.job_id
        form = self.subject.form
        await self._send_whole(send, status_of(form, error), form.error_body(error), retry_after(error))

    async def _send_whole(self, send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
        await self.send_start(
            send, status, {"content-type": "application/json", "content-length": str(len(body)), **headers}
        )
        await send({"type": "http.response.body", "body": body})

    async def send_start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        subject = self.subject
        subject.status, subject.began_at = status, time.monotonic()
        named = {**id_headers(subject.form, subject.job_id), **subject.headers, **headers}
        named["x-headrace-model"] = quote(subject.view.model, _SAFE)
        if self.subject.is_replay:
            named["x-idempotent-replay"] = "true"
        if self.subject.trace is not None:
            named["traceresponse"] = self.subject.trace.context.traceparent
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


class WholeReply(Reply):
    """A response in one piece."""

    async def respond(self, send: Send) -> None:
        whole = self.subject.form.whole(self.subject.job_id, self.subject.view)
        try:
            while True:
                for entry in await self.reader.read():
                    whole.feed(entry)
                    self.subject.stages.note(entry)
                    if ended := end_of(entry):
                        raise_failure(ended)
                        await self._send_whole(send, 200, whole.body(), {})
                        self.outcome = "ok"
                        return
        except ClientGone:
            raise
        except HeadraceError as error:
            await self.refuse(send, error)


def end_of(entry: ReadEntry) -> Ended | None:
    last = entry.events[-1] if entry.events else None
    return last if isinstance(last, Ended) else None


def raise_failure(ended: Ended) -> None:
    """Raise what a job that did not finish ended with."""
    if ended.status != "done":
        failure = ended.error
        raise errors.from_failure(failure.code, failure.message, failure.param) if failure else JobEnded()


def retry_after(error: HeadraceError) -> dict[str, str]:
    return {"retry-after": str(error.retry_after_s)} if error.retry_after_s is not None else {}
