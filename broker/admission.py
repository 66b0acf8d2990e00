"""What the script `admit` is told of a job, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from headrace.broker import messages
from headrace.broker.errors import LimitReached, NoCapacity, OwnerQueueFull, QueueFull, RequestPoisoned
from headrace.broker.limits import Bucket, Standing
from headrace.broker.protocol import Admission, Admitted
from headrace.broker.settings import QueueSettings


def arguments(admission: Admission, queue: QueueSettings) -> list[str | bytes | float]:
    """ARGV of `admit.lua`, in its order."""
    job, timeout_ms = admission.job, admission.queue_timeout_ms
    log_ttl_s = max(queue.log_ttl_s, queue.stored_ttl_s) if admission.is_kept else queue.log_ttl_s
    return [
        job.id,
        messages.encode(job),
        messages.encode(admission.view),
        job.model,
        admission.view.band,
        admission.pod or "",
        admission.grace_ms,
        _ms(queue.reader_lease_s),
        _ms(queue.queue_timeout_s) if timeout_ms is None else timeout_ms,
        _ms(queue.queue_timeout_s + queue.max_run_s + log_ttl_s),
        _ms(log_ttl_s),
        queue.max_deaths,
        *_queueing(admission, queue),
        _ms(queue.max_run_s),
        int(admission.is_kept),
        admission.prefix,
        *_limits(admission),
        admission.digest,
    ]


def _queueing(admission: Admission, queue: QueueSettings) -> Iterator[str | float]:
    """The owner, what the job costs, and the bounds."""
    share = admission.share
    yield from (admission.view.owner, admission.prompt_tokens, admission.cost_tokens, share.weight, queue.batch_share)
    yield from (queue.max_waiting_jobs, queue.max_waiting_bytes, queue.max_waiting_tokens)
    for bound in (share.max_waiting_jobs, share.max_waiting_bytes, share.max_waiting_tokens):
        yield "" if bound is None else bound


def _limits(admission: Admission) -> tuple[str | bytes, int]:
    """The limits of its key and owner, and whether it streams."""
    found = admission.allowance
    if found is None:
        return "", 0
    told = [[limit or False for limit in astuple(limits)] for limits in (found.of_key, found.of_owner)]
    return msgspec.msgpack.encode([found.key, *told]), int(admission.view.stream)


def answer(said: Sequence[Any]) -> Admitted:
    """What became of the job; raises what it was refused with."""
    match said:
        case [b"admitted", last, enqueued_ms, *standing]:
            return Admitted(True, last.decode(), enqueued_ms, _standing(standing))
        case [b"no_capacity", why]:
            raise NoCapacity(why.decode())
        case [b"poisoned", left_ms]:
            raise RequestPoisoned(retry_after_s=math.ceil(left_ms / 1000))
        case [b"limit", whose, name, limit, retry_ms, *standing]:
            raise LimitReached.of(whose.decode(), name.decode(), limit, retry_ms, _standing(standing))
        case [b"queue_full", waiting, retry_after_s]:
            raise QueueFull.of(waiting, retry_after_s)
        case [b"owner_queue_full", waiting, retry_after_s]:
            raise OwnerQueueFull.of(waiting, retry_after_s)
    return Admitted(False, said[1].decode())


def _standing(rows: Sequence[Sequence[int]]) -> Standing:
    requests, tokens = (Bucket(*row) if row else None for row in rows)
    return Standing(requests, tokens)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
