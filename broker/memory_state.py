"""What one shard of `memory.MemoryBroker` holds, and the steps that its verbs share: the counterpart of `lib.lua`.

Times are epoch milliseconds of the clock that the shard is given. Jobs are searched, not indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace.broker.affinity import Holders
from headrace.broker.hints import encode_hint
from headrace.broker.keys import position
from headrace.broker.memory_limits import Accounts
from headrace.broker.memory_queue import Drain, Fair, Load
from headrace.broker.messages import (
    BANDS,
    Ended,
    Entry,
    Event,
    Failure,
    Status,
    Usage,
    encode,
)
from headrace.broker.protocol import Admission, Append, Position, Written
from headrace.broker.settings import QueueSettings

FORGET_MS = 10_000
"""How long readers of a job that is forgotten may still read it."""
POISON_MS = 3_600_000
"""How long the like of a dead letter is refused to its owner."""


@dataclass
class StoredJob:
    """What Redis holds of one job; a time of None means that the job is not in that list."""

    admission: Admission
    spec_bytes: int
    age: int
    tag: float
    enqueued_ms: int
    expires_ms: int
    place: str | None
    deadline_ms: int | None
    unread_ms: int | None
    log: list[tuple[Position, bytes]]
    readers: dict[str, int] = field(default_factory=dict)
    attempt: int = 0
    deaths: int = 0
    worker: str | None = None
    lease_ms: int | None = None
    cancel: str = ""
    ended: Status | None = None
    overrun_ms: int | None = None
    usage: Usage | None = None
    """What it has used, once all its choices are finished."""
    died: tuple[int, str, str] | None = None
    """A dead letter: when, of what, with whom."""

    passed: int = 0
    """How often jobs of equal rank have overtaken it."""
    resumes: int = 0
    """Readers that came after its first."""
    is_kept: bool = False
    is_forgotten: bool = False

    @property
    def last(self) -> Position:
        return self.log[-1][0]

    @property
    def model(self) -> str:
        return self.admission.job.model

    @property
    def owner(self) -> str:
        return self.admission.view.owner

    @property
    def load(self) -> Load:
        return 1, self.spec_bytes, self.admission.prompt_tokens

    def pods(self, now: int) -> list[str]:
        return [pod for pod, until_ms in self.readers.items() if until_ms > now]


class ShardState:
    """`publish` delivers a message to a `pod` or a `replica` and says whether it was there to hear it."""

    def __init__(
        self, queue: QueueSettings, now_ms: Callable[[], int], publish: Callable[[str, str, bytes], bool]
    ) -> None:
        self._queue = queue
        self._now_ms = now_ms
        self.publish = publish
        self._jobs: dict[str, StoredJob] = {}
        self._serial = 0
        self._reaped_ms: int | None = None
        self._held_ms: int | None = None
        self._news: dict[str, dict[str, int]] = {}
        self._idle: dict[str, list[str]] = {}
        self._fair: dict[tuple[str, str], Fair] = {}
        self._drain: dict[str, Drain] = {}
        self._holders: dict[str, Holders] = {}
        self._capacity: dict[str, dict[str, int]] = {}
        self.accounts = Accounts(self.find)
        self._arrived: dict[str, tuple[int, int]] = {}
        self._starts: dict[str, int] = {}
        self._poisoned: dict[str, int] = {}
        """Digests of requests that are refused, by until when."""
        self._unplaced: dict[str, tuple[int, str]] = {}
        self._present: dict[str, dict[str, tuple[int, dict[str, str]]]] = {"replicas": {}, "pods": {}}

    def find(self, job_id: str) -> StoredJob | None:
        stored = self._jobs.get(job_id)
        if stored is not None and stored.expires_ms <= self._now_ms():
            del self._jobs[job_id]
            return None
        return stored

    def _live(self) -> list[StoredJob]:
        return [stored for job_id in list(self._jobs) if (stored := self.find(job_id))]

    def _waiting(self, model: str) -> Iterator[StoredJob]:
        """The queue of a model, best first."""
        waiting = [(BANDS.index(s.place), s.tag, s.age, s) for s in self._live() if s.place and s.model == model]
        return (row[3] for row in sorted(waiting, key=lambda row: row[:3]))

    def _load(self, model: str, owner: str | None = None) -> Load:
        """What waits, of all owners or of one; counted each time, where Redis keeps the hash `load`."""
        loads = [stored.load for stored in self._waiting(model) if owner in (None, stored.owner)]
        return sum(load[0] for load in loads), sum(load[1] for load in loads), sum(load[2] for load in loads)

    def _is_served(self, model: str) -> bool:
        return any(until_ms > self._now_ms() for until_ms in self._capacity.get(model, {}).values())

    def _why_unplaced(self, model: str) -> str:
        until_ms, why = self._unplaced.get(model, (0, ""))
        return why if until_ms > self._now_ms() else ""

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _tell(self, replica: str, job_id: str) -> None:
        self._news.setdefault(replica, {})[job_id] = self._next_serial()

    def _append(self, stored: StoredJob, entry_id: Position, event: Event) -> None:
        self._append_data(stored, entry_id, encode(Entry(self._now_ms() - stored.enqueued_ms, [event])))

    def _append_data(self, stored: StoredJob, entry_id: Position, data: bytes) -> None:
        stored.log.append((entry_id, data))
        message = encode_hint([Append(stored.admission.job.id, entry_id, data)])
        for pod in stored.pods(self._now_ms()):
            self.publish("pod", pod, message)

    def _enqueue(self, stored: StoredJob, band: str) -> None:
        stored.place = band
        idle, prefix = self._idle.get(stored.model, []), stored.admission.prefix
        for replica in self._holders_of(stored.model).holders(prefix) if prefix else []:
            if replica in idle:
                idle.remove(replica)
                if self.publish("replica", replica, b""):
                    return
        while idle and not self.publish("replica", idle.pop(0), b""):
            pass

    def _holders_of(self, model: str) -> Holders:
        return self._holders.setdefault(model, Holders())

    def _dequeue(self, stored: StoredJob) -> None:
        band, stored.place = stored.place or "", None
        waiting = list(self._waiting(stored.model))
        if all(other.owner != stored.owner for other in waiting) and (fair := self._fair.get((stored.model, band))):
            fair.starts.pop(stored.owner, None)
        if all(other.place != band for other in waiting):
            self._fair.pop((stored.model, band), None)

    def _start_tag(self, model: str, admission: Admission) -> float:
        fair = self._fair.setdefault((model, admission.view.band), Fair())
        return fair.start_tag(admission.view.owner, admission.cost_tokens / admission.share.weight)

    def _correct(self, stored: StoredJob, band: str, actual_tokens: int) -> None:
        admission = stored.admission
        if fair := self._fair.get((stored.model, band)):
            fair.correct(stored.owner, (actual_tokens - admission.cost_tokens) / admission.share.weight)

    def _charge(self, stored: StoredJob, usage: Usage | None) -> None:
        if usage:
            self._correct(stored, stored.admission.view.band, usage.prompt_tokens + usage.completion_tokens)

    def _finish(self, stored: StoredJob, entry_id: Position, data: bytes, status: Status, used: Usage) -> None:
        self._append_data(stored, entry_id, data)
        self.accounts.settle(stored.admission, used, stored.enqueued_ms, self._now_ms())
        if band := stored.place:
            self._dequeue(stored)
            self._correct(stored, band, 0)
        stored.place = stored.worker = stored.lease_ms = stored.unread_ms = stored.deadline_ms = stored.overrun_ms = (
            None
        )
        stored.cancel, stored.ended = "", status
        stored.expires_ms = self._now_ms() + self._log_ttl_ms(stored)

    def _log_ttl_ms(self, stored: StoredJob) -> int:
        if stored.is_forgotten:
            return FORGET_MS
        return ms(max(self._queue.log_ttl_s, self._queue.stored_ttl_s if stored.is_kept else 0.0))

    def _finish_unrun(self, stored: StoredJob, status: Status, code: str, message: str = "") -> bool:
        if stored.ended is not None:
            return False
        usage = stored.usage
        ended = Ended("done", usage=usage) if usage else Ended(status, Failure(code, message))
        steps = max(0, len(stored.log) - 3)  # as the script counts them, which does not read the log
        so_far = Usage(stored.admission.prompt_tokens, steps) if stored.attempt else Usage(0, 0)
        stored.attempt += 1
        entry = Entry(self._now_ms() - stored.enqueued_ms, [ended])
        self._finish(stored, f"{stored.attempt}-0", encode(entry), ended.status, usage or so_far)
        return usage is None

    def _finish_marked(self, stored: StoredJob, cause: str) -> None:
        if cause == "max_run":
            self._finish_unrun(stored, "failed", "run_timeout")
        else:
            self._finish_unrun(stored, "cancelled", "cancelled")

    def _bury(self, stored: StoredJob, worker: str, how: str) -> None:
        now = self._now_ms()
        if not self._finish_unrun(stored, "failed", "too_many_deaths"):
            return
        if stored.admission.digest:
            self._poisoned[stored.admission.digest] = now + POISON_MS
        stored.died = now, how, worker
        stored.expires_ms = max(stored.expires_ms, now + ms(self._queue.dead_letter_ttl_s))

    def _hand_back(self, stored: StoredJob, death: str) -> None:
        worker, stored.worker, stored.lease_ms = stored.worker, None, None
        if worker:
            self._tell(worker, stored.admission.job.id)
        stored.deaths += bool(death)
        if stored.cancel:
            self._finish_marked(stored, stored.cancel)
        elif stored.deaths >= self._queue.max_deaths:
            self._bury(stored, worker or "", death)
        else:
            self._enqueue(stored, "resume")

    def _check_writer(self, job_id: str, attempt: int, last: Position | None) -> Written:
        stored = self.find(job_id)
        if stored is None:
            return "gone"
        if stored.attempt != attempt:
            return "stale"
        if stored.ended:
            return "ok" if last and stored.last == next_id(last) else "stale"
        return "ok" if stored.last == last else "behind"


def is_over(until_ms: int | None, now: int) -> bool:
    return until_ms is not None and until_ms <= now


def next_id(entry_id: Position) -> Position:
    attempt, n = position(entry_id)
    return f"{attempt}-{n + 1}"


def ms(seconds: float) -> int:
    return round(seconds * 1000)
