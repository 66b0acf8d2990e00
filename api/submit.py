"""From a request to a response: check, admit, attach. One function for each way in."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec import structs
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response

from headrace.api import auth, catalog, estimate, fallback, ratelimit, requests
from headrace.api.connection import Connection
from headrace.api.pod import Pod
from headrace.api.relay import StreamReply
from headrace.api.reply import Subject, WholeReply
from headrace.api.requests import Cut, Skip
from headrace.api.wire import BY_NAME, bounds
from headrace.api.wire.format import Format, Parsed, Whole
from headrace.broker import keys, metrics, prefixes
from headrace.broker.api_keys import KeySettings
from headrace.broker.errors import (
    BadPosition,
    BadRequest,
    IdempotencyKeyReused,
    JobNotFound,
    LogLost,
)
from headrace.broker.limits import Allowance, home_shard
from headrace.broker.messages import Job, View, decode_entry
from headrace.broker.protocol import Admission, JobStatus, Share
from headrace.broker.tail import REPAIR_S, START, Reader

log = logging.getLogger(__name__)

_PAGE = 1000
"""Log entries read at a time."""


Complete = Callable[[Parsed], Awaitable[Parsed]]
"""What a route does with a request that was read, if that takes more than the body."""


class Place(NamedTuple):
    """A reader's place in a job's log; `cut` is what its client has already. A job in the background has no reader."""

    subject: Subject
    reader: Reader | None
    cut: Cut | Skip | None = None

    @property
    def stream(self) -> StreamReply:
        assert self.reader is not None
        return StreamReply(self.subject, self.reader, self.cut)

    async def reply(self) -> Response:
        """In pieces or in one, as was asked for when the job was made; without a reader, as far as it has come."""
        subject = self.subject
        if self.reader is None:
            headers = {"x-idempotent-replay": "true"} if subject.is_replay else subject.headers
            return await as_it_is(subject.pod, subject.job_id, subject.view, subject.form, headers)
        return self.stream if subject.view.stream else WholeReply(subject, self.reader)


async def generate(
    pod: Pod, request: Request, form: Format, body: bytes | None = None, complete: Complete | None = None
) -> Response:
    """A route that generates: a new job, or with a position in the request the rest of one that is there.

    `body` is what stands in for the request's own, where it has none.
    """
    cut = requests.cut(request, pod.broker.shards)
    if cut is not None:
        return await resume(pod, request, cut.job_id, form)
    if body is None:
        body = await requests.read_body(request, pod.settings.api)
    return await (await admit(pod, request, form, body, complete)).reply()


async def admit(  # who asks, for what, in which words
    pod: Pod,
    request: HTTPConnection,
    form: Format,
    body: bytes,
    complete: Complete | None = None,
) -> Place:
    """A new job of a body, and its first reader; the request's headers say how it waits and what leaving means."""
    accepted_at = time.monotonic()
    key = auth.caller_of(request)
    idempotency_key, coalesce_s = requests.idempotency_key(request), requests.coalesce_s(request)
    parsed = form.parse(body, pod.settings.api)
    bounds.check(parsed.job, pod.settings.api)
    model = catalog.chosen(pod, request, parsed.job.model)
    parsed = structs.replace(parsed, job=structs.replace(parsed.job, model=model.name))
    pod.require_broker()
    if complete is not None:
        parsed = await complete(parsed)
    # who sends a key means to come back, so that also a response in one piece outlives its connection
    default_ms = round(pod.settings.api.grace_s * 1000) if parsed.stream or idempotency_key else 0
    grace_ms = requests.grace_ms(request, default_ms=-1 if parsed.is_background else default_ms)
    is_unread = parsed.is_background and not parsed.stream
    job, view = _job(pod, request, form, parsed)
    trace = None
    if pod.tracing is not None:
        trace, job, view = pod.tracing.stamp(request, job, view)
    if idempotency_key is not None:
        job_id = keys.idempotent_job_id(await pod.secret(), key.owner, idempotency_key, pod.broker.shards)
        job = structs.replace(job, id=_placed(pod, key, job_id))
        view = structs.replace(view, fingerprint=hashlib.sha256(body).hexdigest())
    admission = Admission(
        job,
        view,
        None if is_unread else pod.id,
        grace_ms,
        estimate.prompt_tokens(job.prompt),
        estimate.cost_tokens(job, model.context_tokens),
        Share(key.weight, key.max_waiting_jobs, key.max_waiting_bytes, key.max_waiting_tokens),
        requests.queue_timeout_ms(request, pod.settings.queue.queue_timeout_s),
        parsed.is_kept,
        prefixes.anchors(job),
        digest=_digest(key.owner, form.name, body),
        allowance=Allowance(key.id, key.limits, key.owner_limits) if key.is_limited else None,
    )
    try:
        admission, admitted = await fallback.admit(pod, request, admission, model)
    except OverflowError as error:  # in a schema, say, where anything may stand
        raise BadRequest("the body has a whole number of more than 64 bits") from error
    if not admitted.is_new:
        return await _join(pod, request, job.id, view, is_unread=is_unread)
    log.debug("job %s admitted", job.id, extra={"event": "job_admitted", "request_id": job.id})
    subject = _of(request, Subject(pod, job.id, admission.view, form, requests.route_of(request), None, coalesce_s))
    subject.trace, subject.headers = trace, ratelimit.headers(form.name, admitted.standing)
    subject.time(accepted_at)
    if is_unread:
        request.state.job_id = job.id
        subject.count("accepted")
        return Place(subject, None)
    return Place(subject, pod.tail.open_admitted(job.id, admitted))


def _of(request: HTTPConnection, subject: Subject) -> Subject:
    subject.received_at = Connection.of(request.scope).received_at
    return subject


def _another(request: HTTPConnection, subject: Subject, status: JobStatus) -> Subject:
    """What a reader is about whose job another request has made."""
    subject.resumes = status.resumes + 1
    if (tracing := subject.pod.tracing) is not None:
        subject.trace = tracing.begin(tracing.parent(request), subject.view)
    return _of(request, subject)


def _digest(owner: str, form: str, body: bytes) -> str:
    """The same for the same request of the same owner; 128 bits, so that nobody finds another of the same."""
    digest = hashlib.sha256(f"{owner}\0{form}\0".encode())
    digest.update(body)
    return digest.hexdigest()[:32]


async def _join(pod: Pod, request: HTTPConnection, job_id: str, asked: View, *, is_unread: bool) -> Place:
    """The whole answer of a job that an earlier request with this idempotency key has made, live or ended.

    Raises IdempotencyKeyReused if that was another request.
    """
    status = await pod.broker.status(job_id)
    if status is None:
        raise JobNotFound("the answer to this Idempotency-Key has just expired; send the request again")
    view = status.view
    if (view.fingerprint, view.format) != (asked.fingerprint, asked.format):
        raise IdempotencyKeyReused(param="Idempotency-Key")
    request.state.job_id = job_id
    reader = None if is_unread else await pod.tail.attach(job_id)
    log.debug("job %s joined", job_id, extra={"event": "job_joined", "request_id": job_id})
    coalesce_s = requests.coalesce_s(request)
    subject = Subject(
        pod, job_id, view, BY_NAME[view.format], requests.route_of(request), _asked_grace_ms(request), coalesce_s
    )
    _another(request, subject, status).is_replay = True
    if is_unread:
        subject.count("accepted")
    return Place(subject, reader)


async def as_it_is(
    pod: Pod, job_id: str, view: View, form: Format, headers: Mapping[str, str] = MappingProxyType({})
) -> Response:
    """What a job has come to so far, in one piece, without waiting; for formats whose `body` may be asked early."""
    whole = form.whole(job_id, view)
    await fold_log(pod, job_id, whole)
    return Response(whole.body(), 200, {"x-request-id": job_id, **headers}, "application/json")


async def fold_log(pod: Pod, job_id: str, whole: Whole) -> None:
    """Feed a log, as far as it has come; raises JobNotFound if there is none."""
    first = START
    while rows := await pod.broker.read(job_id, first, _PAGE):
        for entry_id, data in rows:
            whole.feed(decode_entry(entry_id, data))
        attempt, n = keys.position(rows[-1][0])
        first = f"{attempt}-{n + 1}"
    if first == START:
        raise JobNotFound


def _asked_grace_ms(request: HTTPConnection) -> int | None:
    """What a reader that has come to a job that was there says about its leaving; None if nothing."""
    asked_ms = requests.grace_ms(request, default_ms=-2)
    return None if asked_ms == -2 else asked_ms


async def resume(
    pod: Pod, request: HTTPConnection, job_id: str, form: Format | None, skip: Skip | None = None
) -> StreamReply:
    """The stream of a job from a position on, or from its start, in its own format or another."""
    cut = None if skip else requests.cut(request, pod.broker.shards)
    place = await attach(pod, request, job_id, form, cut)
    return place._replace(cut=skip or cut).stream


async def attach(pod: Pod, request: HTTPConnection, job_id: str, form: Format | None, cut: Cut | None) -> Place:
    """One more reader of a job that is there."""
    grace_ms, coalesce_s = _asked_grace_ms(request), requests.coalesce_s(request)
    pod.pace.take(auth.caller_of(request))
    status = await find(pod, request, job_id)
    form = form or BY_NAME[status.view.format]
    if cut is not None:
        status = await _repaired(pod, cut, status)
    _check_cut(cut, job_id, status, form)
    reader = await pod.tail.attach(job_id)
    metrics.RESUMES.labels("ok").inc()
    log.debug("job %s resumed", job_id, extra={"event": "job_resumed", "request_id": job_id})
    subject = Subject(pod, job_id, status.view, form, "/v1/streams/{job}", grace_ms, coalesce_s)
    _another(request, subject, status).is_resume = True
    return Place(subject, reader, cut)


async def has_all(pod: Pod, request: HTTPConnection, cut: Cut) -> bool:
    """Has a client that comes back seen the end already? Then there is nothing to send."""
    status = await find(pod, request, cut.job_id)
    has_ended = status.state not in ("waiting", "running")
    return has_ended and cut.frame is None and cut.entry == keys.position(status.last)


async def find(pod: Pod, request: HTTPConnection, job_id: str) -> JobStatus:
    """The job, if it is the caller's; one of somebody else is not found, like one that is not there.

    From then on the request is about this job: `request.state.job_id`, which also the errors that follow carry.
    """
    if not keys.is_job_id(job_id, pod.broker.shards):
        raise BadRequest("a stream's id is 32 hex digits", param="job")
    status = await pod.broker.status(job_id, auth.caller_of(request).owner)
    if status is None:
        raise JobNotFound
    request.state.job_id = job_id
    return status


async def _repaired(pod: Pod, cut: Cut, status: JobStatus) -> JobStatus:
    """A running job whose log ends before the position: its worker may be about to write the lost end again."""
    deadline = time.monotonic() + REPAIR_S
    while cut.entry > keys.position(status.last or "0-0") and status.state == "running":
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
        status = await pod.broker.status(cut.job_id) or status
    return status


def _check_cut(cut: Cut | None, job_id: str, status: JobStatus, form: Format) -> None:
    if cut is None:
        return
    if cut.job_id != job_id:
        raise BadPosition("the position is one of another stream", param="Last-Event-ID")
    if cut.frame is not None and form.name != status.view.format:
        raise BadPosition("a position inside an entry is good only in the format it came from", param="Last-Event-ID")
    if cut.entry > keys.position(status.last or "0-0"):
        metrics.RESUMES.labels("lost").inc()
        raise LogLost("this position is later than anything in the log")


def _placed(pod: Pod, key: KeySettings, job_id: str) -> str:
    """The id of a job where the limits of its key are counted."""
    return keys.at_shard(job_id, home_shard(key.owner, pod.broker.shards)) if key.is_limited else job_id


def _session(request: HTTPConnection, job: Job, owner: str) -> bytes:
    """What keeps the turns of a conversation on one shard, where its prefixes are known: what the client calls it, or
    else how it begins; nothing, if it is too short to gain by that."""
    named = requests.session_id(request)
    if named is None and not prefixes.anchors(job):
        return b""
    return owner.encode() + b"\0" + (prefixes.session(job) if named is None else named.encode())


def _job(pod: Pod, request: HTTPConnection, form: Format, parsed: Parsed) -> tuple[Job, View]:
    key = auth.caller_of(request)
    session = _session(request, parsed.job, key.owner) if pod.broker.shards > 1 and not key.is_limited else b""
    job = structs.replace(
        parsed.job, id=_placed(pod, key, keys.new_job_id(pod.broker.shards, session)), stream=parsed.stream
    )
    view = View(
        key.owner,
        job.model,
        form.name,
        auth.bounded(requests.band(request) or parsed.band, key.ceiling),
        job.n,
        parsed.stream,
        parsed.include_usage,
        job.logprobs is not None,
        requests.user_request_id(request),
        options=parsed.options,
    )
    return job, view
