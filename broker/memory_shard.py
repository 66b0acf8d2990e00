"""One shard of `memory.MemoryBroker`: the verbs of `lua/`, on dicts.

Each method does what the script of its name does, in the same order, so that the two can be read side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from headrace.broker.affinity import TOKENS_PER_BYTE, WINDOW, Candidate, choose, left_ms, seen, turns
from headrace.broker.errors import NoCapacity, OwnerQueueFull, QueueFull, RequestPoisoned
from headrace.broker.keys import position
from headrace.broker.memory_queue import MAX_SHED, Drain, Load, bounds_of, is_full, retry_after_s
from headrace.broker.memory_state import FORGET_MS, ShardState, StoredJob, is_over, ms, next_id
from headrace.broker.messages import (
    BANDS,
    Claimed,
    Ended,
    Entry,
    Job,
    Queued,
    Usage,
    decode_entry,
    decode_usage,
    encode,
)
from headrace.broker.prefixes import split
from headrace.broker.protocol import (
    Admission,
    Admitted,
    Append,
    Asking,
    Claim,
    Claims,
    DeadLetter,
    JobStatus,
    ModelStats,
    News,
    Position,
    Reaped,
    Settle,
    Tick,
    Written,
)


class Taken(NamedTuple):
    """A job that a replica gets, and how many bytes of its prompt the replica holds."""

    stored: StoredJob
    here: int


Presence = Literal["replicas", "pods", "cluster"]
CancelState = Literal["waiting", "running", "ended", "unknown"]


class MemoryShard(ShardState):
    """See `ShardState` for what it is given."""

    # -- a job's life ---------------------------------------------------------------------------------------------

    def admit(self, admission: Admission) -> Admitted:
        job, queue, now = admission.job, self._queue, self._now_ms()
        if known := self.find(job.id):
            return Admitted(False, known.last)
        if (until := self._poisoned.get(admission.digest, now)) > now:
            raise RequestPoisoned(retry_after_s=math.ceil((until - now) / 1000))
        if not self._is_served(job.model):
            raise NoCapacity(self._why_unplaced(job.model))
        self.accounts.check(admission, now)
        self._make_room(admission, now)
        reading_ms = ms(queue.reader_lease_s) if admission.pod else 0
        timeout_ms = admission.queue_timeout_ms
        stored = StoredJob(
            admission,
            spec_bytes=len(encode(job)),
            age=self._next_serial(),
            tag=self._start_tag(job.model, admission),
            enqueued_ms=now,
            expires_ms=now + ms(queue.queue_timeout_s + queue.max_run_s),
            place=None,
            deadline_ms=now + (ms(queue.queue_timeout_s) if timeout_ms is None else timeout_ms),
            unread_ms=now + reading_ms + admission.grace_ms if admission.grace_ms >= 0 else None,
            log=[("0-1", encode(Entry(0, [Queued(now)])))],
            readers={admission.pod: now + reading_ms} if admission.pod else {},
        )
        stored.is_kept = admission.is_kept
        stored.expires_ms += self._log_ttl_ms(stored)
        self._jobs[job.id] = stored
        self._enqueue(stored, admission.view.band)
        jobs, tokens = self._arrived.get(job.model, (0, 0))
        self._arrived[job.model] = jobs + 1, tokens + admission.prompt_tokens
        return Admitted(True, "0-1", now, self.accounts.reserve(admission, now, stored.expires_ms))

    def _make_room(self, admission: Admission, now: int) -> None:
        model, owner, band = admission.job.model, admission.view.owner, admission.view.band
        waiting, own, drain = self._load(model), self._load(model, owner), self._drain.get(model)
        if is_full(own, bounds_of(admission.share)):
            raise OwnerQueueFull.of(own[0], retry_after_s(own[0], drain, now))
        if is_full(waiting, bounds_of(self._queue), self._queue.batch_share if band == "batch" else 1.0):
            shed = [] if band == "batch" else self._to_shed(model, waiting)
            if not shed:
                raise QueueFull.of(waiting[0], retry_after_s(waiting[0], drain, now))
            for stored in shed:
                self._finish_unrun(
                    stored, "failed", "queue_full", "this batch request made room for one that is more urgent"
                )

    def _to_shed(self, model: str, waiting: Load) -> list[StoredJob]:
        """The batch jobs that must end so that the queue is not full; none if they are not enough."""
        batch = [stored for stored in self._waiting(model) if stored.place == "batch"]
        shed: list[StoredJob] = []
        for stored in sorted(batch, key=lambda stored: -stored.age)[:MAX_SHED]:
            shed.append(stored)
            waiting = (waiting[0] - 1, waiting[1] - stored.load[1], waiting[2] - stored.load[2])
            if not is_full(waiting, bounds_of(self._queue)):
                return shed
        return []

    def claim(self, replica: str, models: Sequence[str], count: int, asking: Asking) -> Claims:
        now, claims = self._now_ms(), Claims()
        for model in models:
            self._holders_of(model).drop(replica, split(asking.dropped))

        def is_enough() -> bool:
            tokens = sum(claim.fresh_tokens for claim in claims)
            return len(claims) >= count or (asking.enough_tokens is not None and tokens >= asking.enough_tokens)

        for band in BANDS:
            for model in models:
                while not is_enough() and (taken := self._take(replica, model, band, asking, claims)):
                    claims.append(self._open(replica, taken, now))
                    self._holders_of(model).hold(replica, taken.stored.admission.prefix)
        for model in models:
            self._note_drain(model, sum(claim.job.model == model for claim in claims), now)
            idle = self._idle.setdefault(model, [])
            if replica in idle:
                idle.remove(replica)
            if not is_enough():
                idle.append(replica)
        claims.is_idle = not is_enough()
        return claims

    def _note_drain(self, model: str, jobs: int, now: int) -> None:
        if jobs:
            drain = self._drain.get(model) or Drain(0.0, now)
            self._drain[model] = Drain(drain.decayed(now) + jobs, now)

    def _take(self, replica: str, model: str, band: str, asking: Asking, claims: Claims) -> Taken | None:
        """The next job of a band, in the turn that it has then; None if there is none that the replica may have."""
        waiting = (stored for stored in self._waiting(model) if stored.place == band)
        jobs = list(islice(waiting, 1 if band == "resume" else WINDOW))
        window = [self._candidate(replica, stored, asking) for stored in jobs]
        chosen = choose(window)
        lefts = [job.left_ms for job in seen(window) if job.left_ms]
        claims.again_ms = min([*lefts, *([] if claims.again_ms is None else [claims.again_ms])], default=None)
        if chosen is None:
            return None
        if chosen:
            for stored in jobs[:chosen]:
                stored.passed += 1
            for index, tag in turns(window, chosen):
                jobs[index].tag = tag
        return Taken(jobs[chosen], window[chosen].here)

    def _candidate(self, replica: str, stored: StoredJob, asking: Asking) -> Candidate:
        admission, here, there = stored.admission, 0, 0
        if admission.prefix:
            holders = self._holders_of(stored.model)
            here, there = holders.here_and_there(replica, admission.prefix, self._is_there)
        passed, waited_ms = stored.passed, self._now_ms() - stored.enqueued_ms
        charge = admission.cost_tokens / admission.share.weight
        left = left_ms(here, there, passed, waited_ms, asking.bytes_per_s)
        return Candidate(stored.owner, stored.tag, charge, passed, here, there, left)

    def _is_there(self, replica: str) -> bool:
        until_ms, _ = self._present["replicas"].get(replica, (0, {}))
        return until_ms > self._now_ms()

    def _open(self, replica: str, taken: Taken, now: int) -> Claim:
        stored = taken.stored
        after = stored.last
        stored.attempt += 1
        if fair := self._fair.get((stored.model, stored.place or "")):
            fair.advance(stored.tag)
        self._dequeue(stored)
        stored.worker, stored.deadline_ms = replica, None
        stored.lease_ms = now + ms(self._queue.lease_s)
        if stored.overrun_ms is None:
            stored.overrun_ms = now + ms(self._queue.max_run_s)
        self._append(stored, f"{stored.attempt}-0", Claimed(replica, after))
        waited_ms = now - stored.enqueued_ms
        admission = stored.admission
        fresh = max(admission.prompt_tokens - int(taken.here * TOKENS_PER_BYTE), 1)
        return Claim(admission.job, stored.attempt, after, waited_ms, stored.pods(now), admission.prefix, fresh)

    def tick(self, replica: str, seen: int, renew: bool, list_held: bool) -> Tick:
        now, news = self._now_ms(), self._news.setdefault(replica, {})
        seen = seen if seen <= self._serial else 0
        for job_id in [job_id for job_id, serial in news.items() if serial <= seen]:
            del news[job_id]
        held = [stored for stored in self._live() if stored.worker == replica]
        if renew:
            for stored in held:
                stored.lease_ms = now + ms(self._queue.lease_s)
        ordered = sorted(news, key=news.__getitem__)
        changed = [self._news_of(job_id, replica, now) for job_id in ordered]
        jobs = [stored.admission.job.id for stored in held] if list_held else []
        return Tick(max(news.values(), default=seen), len(held), changed, jobs)

    def _news_of(self, job_id: str, replica: str, now: int) -> News:
        stored = self.find(job_id)
        if stored is None:
            return News(job_id, None, "", [])
        attempt = stored.attempt if stored.worker == replica else None
        return News(job_id, attempt, stored.cancel, stored.pods(now))

    def settle(self, settle: Settle) -> Written:
        check = self._check_writer(settle.job_id, settle.attempt, settle.last)
        if check == "ok":
            stored = self._jobs[settle.job_id]
            if stored.ended is None:
                ended = decode_entry("0-0", settle.data).events[-1]
                usage = ended.usage if isinstance(ended, Ended) else None
                self._charge(stored, usage)
                self._finish(stored, next_id(settle.last), settle.data, settle.status, usage or Usage(0, 0))
        return check

    def release(self, replica: str, job_id: str, attempt: int | None, last: Position | None, is_death: bool) -> Written:
        stored = self.find(job_id)
        if stored is None or stored.worker is None:
            return "gone"
        if stored.worker != replica:
            return "stale"
        if attempt is not None:
            check = self._check_writer(job_id, attempt, last)
            if check != "ok":
                return check
        self._hand_back(stored, "engine_hung" if is_death else "")
        return "ok"

    def cancel(self, job_id: str, cause: str) -> CancelState:
        stored = self.find(job_id)
        if stored is None:
            return "unknown"
        if stored.ended:
            return "ended"
        if stored.worker is None:
            self._finish_marked(stored, cause)
            return "waiting"
        if not stored.cancel:
            stored.cancel = cause
            self._tell(stored.worker, job_id)
        return "running"

    def job(self, job_id: str) -> Job | None:
        stored = self.find(job_id)
        is_there = stored and (stored.ended is None or stored.is_kept or stored.died)
        return stored.admission.job if stored and is_there else None

    def forget(self, job_id: str) -> bool:
        stored = self.find(job_id)
        if stored is None or stored.is_forgotten:
            return False
        stored.is_kept, stored.is_forgotten, stored.died = False, True, None
        if self.cancel(job_id, "delete") == "ended":
            stored.expires_ms = self._now_ms() + FORGET_MS
        return True

    # -- readers --------------------------------------------------------------------------------------------------

    def watch(self, pod: str, job_id: str, *, is_return: bool = False) -> bool:
        stored, now, lease_ms = self.find(job_id), self._now_ms(), ms(self._queue.reader_lease_s)
        if stored is None:
            return False
        stored.resumes += is_return
        is_new = pod not in stored.readers
        stored.readers[pod] = now + lease_ms
        if stored.ended:
            stored.expires_ms = max(stored.expires_ms, now + lease_ms, now + self._log_ttl_ms(stored))
            return True
        if stored.admission.grace_ms >= 0:
            stored.unread_ms = max(stored.unread_ms or 0, now + lease_ms + stored.admission.grace_ms)
        if is_new and stored.worker:
            self._tell(stored.worker, job_id)
        return True

    def unwatch(self, pod: str, job_id: str, asked_ms: int | None) -> None:
        stored, now = self.find(job_id), self._now_ms()
        if stored is None or stored.readers.pop(pod, None) is None or stored.ended:
            return
        if stored.worker:
            self._tell(stored.worker, job_id)
        if not stored.pods(now):
            grace_ms = stored.admission.grace_ms if asked_ms is None else asked_ms
            stored.unread_ms = now + grace_ms if grace_ms > 0 else None
            if grace_ms == 0:
                self.cancel(job_id, "disconnect")

    # -- what runs out --------------------------------------------------------------------------------------------

    def reap(self) -> Reaped:
        now = self._now_ms()
        is_held = self._is_held(now)
        leases = [stored for stored in self._live() if is_over(stored.lease_ms, now) and not is_held]
        for stored in leases:
            self._hand_back(stored, "worker_lost" if stored.last != f"{stored.attempt}-0" else "")
        unread = [stored for stored in self._live() if is_over(stored.unread_ms, now) and not is_held]
        for stored in unread:
            stored.unread_ms = None
            self.cancel(stored.admission.job.id, "unread")
        late = [stored for stored in self._live() if is_over(stored.deadline_ms, now)]
        for stored in late:
            self._finish_unrun(stored, "failed", "timeout")
        overrun = [stored for stored in self._live() if is_over(stored.overrun_ms, now)]
        for stored in overrun:
            stored.overrun_ms = None
            self.cancel(stored.admission.job.id, "max_run")
        waiting = [stored for stored in self._live() if stored.place and not is_held]
        unserved = [stored for stored in waiting if not self._is_served(stored.model)]
        for stored in unserved:
            self._finish_unrun(stored, "failed", "no_capacity", self._why_unplaced(stored.model))
        return Reaped(len(leases), len(unread), len(late), len(unserved), len(overrun))

    def _is_held(self, now: int) -> bool:
        """Has nobody reaped for most of a lease? Then nobody could renew either, and is given a lease time for it."""
        last, held, lease_ms = self._reaped_ms, self._held_ms, ms(self._queue.lease_s)
        self._reaped_ms = now
        if held is not None:
            self._held_ms = held if now < held else None
        elif last is not None and now - last > lease_ms * 2 / 3:
            self._held_ms = now + lease_ms
        return self._held_ms is not None

    # -- what is there --------------------------------------------------------------------------------------------

    def status(self, job_id: str) -> JobStatus | None:
        stored = self.find(job_id)
        if stored is None or stored.is_forgotten:
            return None
        ahead = list(self._waiting(stored.model)).index(stored) if stored.place else None
        state = stored.ended or ("waiting" if stored.place else "running")
        view, attempt, deaths = stored.admission.view, stored.attempt, stored.deaths
        return JobStatus(view, state, stored.last, attempt, ahead, deaths, stored.resumes)

    def dead_letters(self, count: int) -> list[DeadLetter]:
        found = [letter for stored in self._live() if (letter := _letter(stored))]
        return sorted(found, key=lambda letter: (letter.died_ms, letter.job.id), reverse=True)[:count]

    def dead_letter(self, job_id: str) -> DeadLetter | None:
        stored = self.find(job_id)
        return _letter(stored) if stored else None

    def expire(self, job_id: str) -> bool:
        stored = self.find(job_id)
        if stored is None or stored.died is None:
            return False
        stored.died, stored.expires_ms = None, self._now_ms() + self._log_ttl_ms(stored)
        stored.is_kept = False
        return True

    def stats(self, model: str) -> ModelStats:
        waiting, now = dict.fromkeys(BANDS, 0), self._now_ms()
        oldest_ms = 0
        for stored in self._waiting(model):
            waiting[stored.place or ""] += 1
            oldest_ms = max(oldest_ms, now - stored.enqueued_ms)
        running = sum(stored.worker in self._capacity.get(model, {}) for stored in self._live())
        arrived, starts = self._arrived.get(model, (0, 0)), self._starts.get(model, 0)
        why = self._why_unplaced(model)
        return ModelStats(waiting, oldest_ms, running, self._load(model)[2], *arrived, starts, why)

    def note_unplaced(self, model: str, why: str) -> None:
        self._unplaced[model] = self._now_ms() + ms(self._queue.lease_s), why

    def append(self, append: Append) -> Written:
        stored = self.find(append.job_id)
        if stored is None:
            return "gone"
        if position(append.entry_id) <= position(stored.last):
            return "stale"
        stored.log.append((append.entry_id, append.data))
        if append.usage:
            stored.usage = decode_usage(append.usage)
        return "ok"

    def present(self, kind: Presence, id: str, model: str, about: Mapping[str, str | int]) -> None:
        until_ms = self._now_ms() + ms(self._queue.lease_s)
        if model:
            self._capacity.setdefault(model, {})[id] = until_ms
        if kind == "replicas" and about and id not in self.listing("replicas"):
            self._starts[model] = self._starts.get(model, 0) + 1
        if kind != "cluster":
            self._present[kind][id] = until_ms, {name: str(value) for name, value in about.items()}

    def absent(self, kind: Presence, id: str, model: str) -> None:
        self._capacity.get(model, {}).pop(id, None)
        if id in self._idle.get(model, []):
            self._idle[model].remove(id)
        if kind != "cluster":
            self._present[kind].pop(id, None)

    def listing(self, kind: Literal["replicas", "pods"]) -> dict[str, dict[str, str]]:
        now = self._now_ms()
        return {id: about for id, (until_ms, about) in self._present[kind].items() if until_ms > now and about}


def _letter(stored: StoredJob) -> DeadLetter | None:
    if stored.died is None:
        return None
    died_ms, how, worker = stored.died
    return DeadLetter(stored.admission.job, stored.admission.view, stored.deaths, died_ms, how, worker)
