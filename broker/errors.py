"""Every error a caller can meet, as a tree; each class is one sentence, a wire word and an HTTP status.

HeadraceError
├── BadRequest 400 invalid_request        the request itself is wrong; nothing was enqueued
│   ├── ContextLengthExceeded 400         the prompt does not fit the model's context
│   ├── BadPosition 400                   a resume position that cannot be read
│   ├── PreviousNotFound 400              the response to go on from is not there, or not complete
│   ├── IdempotencyKeyReused 422
│   ├── RequestPoisoned 422               the same request has ended as a dead letter
│   ├── BodyTooLarge 413
│   ├── BodyEncoded 415
│   ├── BodyTimeout 408
│   ├── HeadersTimeout 408
│   └── HeadersTooLarge 431
├── Unauthorized 401
├── Forbidden 403                         the key may not do this
├── OriginNotAllowed 403                  a page of another site
├── HostNotAllowed 403                    the request was meant for another address
├── NotFound 404                          no such route, job or model
│   ├── JobNotFound 404
│   └── ModelNotFound 404
├── MethodNotAllowed 405
├── LimitReached 429                      of the caller's key or owner
├── QueueFull 429                         capacity exists, but is contended
│   └── OwnerQueueFull 429                by the caller's own requests
├── Unavailable 503                       capacity does not exist
│   ├── NoCapacity 503
│   ├── Draining 503                      this pod was told to end
│   └── BrokerDown 503                    Redis does not answer
│       └── BrokerFull 503                Redis has no memory left
├── JobEnded                              the job ended without a finish; told in the stream
│   ├── Cancelled 409, QueueTimeout 504, RunTimeout 504, TooManyDeaths 500, EngineFailed (EngineDied) 500
│   ├── NotContinuable 503                its worker was lost, and no other can go on with exactly this answer
│   └── LogLost 410, LogGap 500           the log cannot be continued without showing wrong text
└── ConfigError                           headrace.yaml is wrong; exits with 2

A worker sends `code` and message through the log; `from_failure` builds the same class again in the pod.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar

from headrace.broker.limits import Standing

_PROMPT = re.compile(r"prompt has ([0-9]+) tokens")
_CONTEXT = re.compile(r"context(?: length)? is ([0-9]+)")
"""A log carries an error as a code and a message, so that its numbers stand in the message and nowhere else."""


class HeadraceError(Exception):
    """Something went wrong inside the server."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    retry_after_default_s: ClassVar[int | None] = None
    """What `retry_after_s` is if nobody knows better."""

    def __init__(self, message: str = "", *, param: str | None = None, retry_after_s: int | None = None) -> None:
        self.message = message or (type(self).__doc__ or "").split("\n", 1)[0]
        self.param = param
        self.retry_after_s = self.retry_after_default_s if retry_after_s is None else retry_after_s
        self.job_id: str | None = None
        """The job that it is about, once that is known: some formats say it in the body."""
        super().__init__(self.message)


class BadRequest(HeadraceError):
    """The request is not valid."""

    code = "invalid_request"
    status = 400


class ContextLengthExceeded(BadRequest):
    """The prompt is longer than the model's context."""

    code = "context_length_exceeded"

    @property
    def counts(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the context, if the message says them."""
        prompt, context = _PROMPT.search(self.message), _CONTEXT.search(self.message)
        return (int(prompt[1]), int(context[1])) if prompt and context else None


class BadPosition(BadRequest):
    """The resume position is not one of this stream."""

    code = "invalid_position"


class PreviousNotFound(BadRequest):
    """The previous response is not there, or has expired."""

    code = "previous_response_not_found"


class IdempotencyKeyReused(BadRequest):
    """This Idempotency-Key was used for another request."""

    code = "idempotency_key_reused"
    status = 422


class RequestPoisoned(BadRequest):
    """This request has lost every worker that took it; send another one, or ask the operator to try it again."""

    code = "request_poisoned"
    status = 422


class BodyTooLarge(BadRequest):
    """The request body is larger than this server accepts."""

    code = "body_too_large"
    status = 413


class BodyEncoded(BadRequest):
    """This server takes no compressed request bodies."""

    code = "body_encoded"
    status = 415


class BodyTimeout(BadRequest):
    """The request body did not arrive in time."""

    code = "body_timeout"
    status = 408


class HeadersTooLarge(BadRequest):
    """The request headers are larger than this server accepts."""

    code = "headers_too_large"
    status = 431


class HeadersTimeout(BadRequest):
    """The request headers did not arrive in time."""

    code = "headers_timeout"
    status = 408


class Unauthorized(HeadraceError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    status = 401


class Forbidden(HeadraceError):
    """This API key may not do this."""

    code = "permission_denied"
    status = 403


class OriginNotAllowed(HeadraceError):
    """Pages of this origin may not connect; `api.origins` lists those that may."""

    code = "origin_not_allowed"
    status = 403


class HostNotAllowed(HeadraceError):
    """This server is not known by this name, which `api.hosts` does not list; or there must be keys."""

    code = "host_not_allowed"
    status = 403


class NotFound(HeadraceError):
    """There is nothing at this address."""

    code = "not_found"
    status = 404


class JobNotFound(NotFound):
    """There is no such stream, or it has expired."""

    code = "stream_not_found"


class ModelNotFound(NotFound):
    """There is no such model."""

    code = "model_not_found"


class MethodNotAllowed(HeadraceError):
    """This address does not answer this method."""

    code = "method_not_allowed"
    status = 405


class LimitReached(HeadraceError):
    """A limit of this API key is reached; try again later."""

    code = "rate_limit_exceeded"
    status = 429
    retry_after_default_s = 1
    standing = Standing()
    """How the limits stand that a response tells of."""

    @classmethod
    def of(cls, whose: str, name: str, limit: int, retry_ms: int, standing: Standing) -> LimitReached:
        error = cls(
            f"the limit of this {whose}, {name.replace('_', ' ').removeprefix('max ')}: {limit}, is reached",
            retry_after_s=max(1, math.ceil(retry_ms / 1000)),
        )
        error.standing = standing
        return error


class QueueFull(HeadraceError):
    """The queue of this model is full; try again later."""

    code = "queue_full"
    status = 429
    retry_after_default_s = 5

    @classmethod
    def of(cls, waiting: int, retry_after_s: int) -> QueueFull:
        return cls(f"{waiting} requests wait for this model already", retry_after_s=retry_after_s)


class OwnerQueueFull(QueueFull):
    """Too many of your requests wait for this model; try again later."""

    code = "owner_queue_full"

    @classmethod
    def of(cls, waiting: int, retry_after_s: int) -> QueueFull:
        return cls(f"{waiting} of your requests wait for this model already", retry_after_s=retry_after_s)


class Unavailable(HeadraceError):
    """The service is not available now."""

    code = "unavailable"
    status = 503


class Draining(Unavailable):
    """This pod is about to end; another one answers."""

    code = "draining"


class NoCapacity(Unavailable):
    """No replica serves this model and none is starting."""

    code = "no_capacity"
    retry_after_default_s = 5


class BrokerDown(Unavailable):
    """The broker does not answer."""

    code = "broker_down"


class BrokerFull(BrokerDown):
    """The broker has no memory left for new requests."""

    code = "broker_full"


class JobEnded(HeadraceError):
    """The job ended before it was finished."""

    code = "job_ended"


class Cancelled(JobEnded):
    """The request was cancelled."""

    code = "cancelled"
    status = 409


class QueueTimeout(JobEnded):
    """The request waited in the queue for longer than it may."""

    code = "timeout"
    status = 504


class RunTimeout(JobEnded):
    """The request ran for longer than it may."""

    code = "run_timeout"
    status = 504


class TooManyDeaths(JobEnded):
    """Every worker that took this request was lost."""

    code = "too_many_deaths"


class EngineFailed(JobEnded):
    """The engine failed while it worked on this request."""

    code = "engine_error"


class EngineDied(EngineFailed):
    """The process that makes the tokens has ended."""

    code = "engine_died"


class NotContinuable(JobEnded):
    """The answer was interrupted and cannot be continued exactly; send the request again."""

    code = "not_continuable"
    status = 503


class LogLost(JobEnded):
    """Part of this stream was lost by the broker; what was sent so far is right, the rest is gone."""

    code = "log_lost"
    status = 410


class LogGap(JobEnded):
    """The stream's log has a hole, so it cannot be continued."""

    code = "log_gap"


class ConfigError(HeadraceError):
    """The configuration is wrong."""

    code = "config_error"


def _tree(root: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


BY_CODE: dict[str, type[HeadraceError]] = {kind.code: kind for kind in _tree(HeadraceError)}


def from_failure(code: str, message: str = "", param: str | None = None) -> HeadraceError:
    """The error that a log's `Ended` names; an unknown code (a newer worker) reads as `JobEnded`."""
    return BY_CODE.get(code, JobEnded)(message, param=param)
