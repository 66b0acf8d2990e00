"""From a request to a response: authenticate, check, admit, attach. One function for each way in."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import NamedTuple

from msgspec import structs
from starlette.requests import HTTPConnection, Request

from headrace.api import auth, estimate, requests
from headrace.api.pod import Pod
from headrace.api.relay import Reply, StreamReply, Subject, WholeReply
from headrace.api.requests import Cut
from headrace.api.wire import BY_NAME
from headrace.api.wire.format import Format, Parsed
from headrace.broker import keys, metrics
from headrace.broker.errors import (
    BadPosition,
    BadRequest,
    HeadersTooLarge,
    IdempotencyKeyReused,
    JobNotFound,
    LogLost,
    ModelNotFound,
)
from headrace.broker.messages import Job, View
from headrace.broker.protocol import Admission, JobStatus, Share
from headrace.broker.settings import KeySettings, Model
from headrace.broker.tail import REPAIR_S, Reader

log = logging.getLogger(__name__)


def caller_of(pod: Pod, request: HTTPConnection) -> KeySettings:
    """Check what every route checks before it reads a body."""
    limit = pod.settings.api.max_header_bytes
    if sum(len(name) + len(value) for name, value in request.scope["headers"]) > limit:
        raise HeadersTooLarge(f"the headers are larger than {limit} bytes")
    return auth.caller(request, pod.settings.keys)


class Place(NamedTuple):
    """A reader's place in a job's log; `cut` is what its client has already."""

    subject: Subject
    reader: Reader
    cut: Cut | None = None

    @property
    def stream(self) -> StreamReply:
        return StreamReply(self.subject, self.reader, self.cut)

    @property
    def reply(self) -> Reply:
        """In pieces or in one, as was asked for when the job was made."""
        return self.stream if self.subject.view.stream else WholeReply(self.subject, self.reader)


async def generate(pod: Pod, request: Request, form: Format, body: bytes | None = None) -> Reply:
    """A route that generates: a new job, or with a position in the request the rest of one that is there.

    `body` is what stands in for the request's own, where it has none.
    """
    key = caller_of(pod, request)
    cut = requests.cut(request, pod.broker.shards)
    if cut is not None:
        return await resume(pod, request, cut.job_id, form)
    if body is None:
        body = await requests.read_body(request, pod.settings.api)
    return (await admit(pod, request, form, body, key)).reply


async def admit(pod: Pod, request: HTTPConnection, form: Format, body: bytes, key: KeySettings) -> Place:
    """A new job of a body, and its first reader; the request's headers say how it waits and what leaving means."""
    idempotency_key = requests.idempotency_key(request)
    parsed = form.parse(body, pod.settings.api)
    model = chosen(pod, request, parsed.job.model)
    parsed = structs.replace(parsed, job=structs.replace(parsed.job, model=model.name))
    pod.require_broker()
    # who sends a key means to come back, so that also a response in one piece outlives its connection
    default_ms = round(pod.settings.api.grace_s * 1000) if parsed.stream or idempotency_key else 0
    grace_ms = requests.grace_ms(request, default_ms=default_ms)
    job, view = _job(pod, request, form, parsed, key)
    if idempotency_key is not None:
        job_id = keys.idempotent_job_id(await pod.secret(), key.owner, idempotency_key, pod.broker.shards)
        job = structs.replace(job, id=job_id)
        view = structs.replace(view, fingerprint=hashlib.sha256(body).hexdigest())
    admission = Admission(
        job,
        view,
        pod.id,
        grace_ms,
        estimate.prompt_tokens(job.prompt),
        estimate.cost_tokens(job, model.context_tokens),
        Share(key.weight, key.max_waiting_jobs, key.max_waiting_bytes, key.max_waiting_tokens),
        requests.queue_timeout_ms(request, pod.settings.queue.queue_timeout_s),
    )
    try:
        admitted = await pod.broker.admit(admission)
    except OverflowError as error:  # in a schema, say, where anything may stand
        raise BadRequest("the body has a whole number of more than 64 bits") from error
    if not admitted.is_new:
        return await _join(pod, request, job.id, view)
    reader = pod.tail.open_admitted(job.id, admitted)
    log.info("job %s admitted", job.id, extra={"event": "job_admitted", "user_request_id": view.user_request_id})
    return Place(Subject(pod, job.id, view, form, request.url.path, None), reader)


async def _join(pod: Pod, request: HTTPConnection, job_id: str, asked: View) -> Place:
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
    reader = await pod.tail.attach(job_id)
    log.info("job %s joined", job_id, extra={"event": "job_joined", "user_request_id": asked.user_request_id})
    subject = Subject(pod, job_id, view, BY_NAME[view.format], request.url.path, _asked_grace_ms(request))
    subject.is_replay = True
    return Place(subject, reader)


def _asked_grace_ms(request: HTTPConnection) -> int | None:
    """What a reader that has come to a job that was there says about its leaving; None if nothing."""
    asked_ms = requests.grace_ms(request, default_ms=-2)
    return None if asked_ms == -2 else asked_ms


async def resume(pod: Pod, request: HTTPConnection, job_id: str, form: Format | None) -> StreamReply:
    """The stream of a job from a position on, or from its start, in its own format or another."""
    return (await attach(pod, request, job_id, form, requests.cut(request, pod.broker.shards))).stream


async def attach(pod: Pod, request: HTTPConnection, job_id: str, form: Format | None, cut: Cut | None) -> Place:
    """One more reader of a job that is there."""
    status = await find(pod, request, job_id)
    form = form or BY_NAME[status.view.format]
    if cut is not None:
        status = await _repaired(pod, cut, status)
    _check_cut(cut, job_id, status, form)
    reader = await pod.tail.attach(job_id)
    metrics.RESUMES.labels("ok").inc()
    log.info("job %s resumed", job_id, extra={"event": "job_resumed"})
    return Place(Subject(pod, job_id, status.view, form, "/v1/streams/{job}", _asked_grace_ms(request)), reader, cut)


async def has_all(pod: Pod, request: HTTPConnection, cut: Cut) -> bool:
    """Has a client that comes back seen the end already? Then there is nothing to send."""
    status = await find(pod, request, cut.job_id)
    has_ended = status.state not in ("waiting", "running")
    return has_ended and cut.frame is None and cut.entry == keys.position(status.last)


async def find(pod: Pod, request: HTTPConnection, job_id: str) -> JobStatus:
    """The job, if it is the caller's; one of somebody else is not found, like one that is not there.

    From then on the request is about this job: `request.state.job_id`, which also the errors that follow carry.
    """
    key = caller_of(pod, request)
    if not keys.is_job_id(job_id, pod.broker.shards):
        raise BadRequest("a stream's id is 32 hex digits", param="job")
    status = await pod.broker.status(job_id)
    if status is None or status.view.owner != key.owner:
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


def chosen(pod: Pod, request: HTTPConnection, name: str) -> Model:
    """The model that a request means. Only formats that need not name one leave `name` empty: `?model=` says it then,
    or it is the first one."""
    return model_of(pod, name or request.query_params.get("model") or pod.settings.models[0].name)


def model_of(pod: Pod, name: str) -> Model:
    """The configured model of a name, in which the tag `latest` says nothing; raises ModelNotFound."""
    for model in pod.settings.models:
        if name in (model.name, f"{model.name}:latest", model.name.removesuffix(":latest")):
            return model
    raise ModelNotFound(f"model {name[:128]!r} not found; GET /v1/models lists what there is", param="model")


def _job(pod: Pod, request: HTTPConnection, form: Format, parsed: Parsed, key: KeySettings) -> tuple[Job, View]:
    job = structs.replace(parsed.job, id=keys.new_job_id(pod.broker.shards))
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
