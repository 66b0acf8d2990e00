"""A broker in this process's memory, for programs and tests without a server: it keeps the whole promise of `protocol`.

Nothing survives the process, and only what runs in one event loop can share it. Hints and wake-ups are delivered in the
loop's next turn and in order, as if they had crossed a wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from headrace.broker import keys
from headrace.broker.hints import encode_hint
from headrace.broker.keys import position
from headrace.broker.ledger import Ledger, MemoryLedger
from headrace.broker.memory_shard import CancelState, MemoryShard, Presence
from headrace.broker.messages import BANDS, Job, ScaleDecision
from headrace.broker.protocol import (
    MAX_DECISIONS,
    NOTHING_SAID,
    Admission,
    Admitted,
    Append,
    Asking,
    Claims,
    DeadLetter,
    Exchange,
    Hint,
    JobStatus,
    ModelStats,
    Position,
    Reaped,
    Settle,
    Tick,
    Written,
)
from headrace.broker.settings import QueueSettings


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryBroker:
    """See `protocol.Broker`. `clock` tells epoch milliseconds; everything that runs out runs out by it."""

    def __init__(self, queue: QueueSettings, shards: int = 1, clock: Callable[[], int] = wall_clock_ms) -> None:
        self.shards = shards
        self.ledger: Ledger = MemoryLedger(lambda: (shard.accounts for shard in self._shards))
        self._secret = b""
        self._decisions: dict[str, list[ScaleDecision]] = {}
        self._decided: dict[str, dict[str, int]] = {}
        self._listeners: dict[tuple[str, str], list[MemoryListener]] = {}
        self._shards = [MemoryShard(queue, clock, self._publisher(shard)) for shard in range(shards)]

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def ping(self) -> float:
        return 0.0

    def _publisher(self, shard: int) -> Callable[[str, str, bytes], bool]:
        def publish(kind: str, id: str, message: bytes) -> bool:
            listeners = self._listeners.get((kind, id), [])
            for listener in listeners:
                listener.deliver(shard, message)
            return bool(listeners)

        return publish

    def _of(self, job_id: str) -> MemoryShard:
        return self._shards[keys.shard_of(job_id)]

    # -- a job's life ---------------------------------------------------------------------------------------------

    async def admit(self, admission: Admission) -> Admitted:
        return self._of(admission.job.id).admit(admission)

    async def claim(
        self, shard: int, replica: str, models: str | Sequence[str], count: int, asking: Asking = NOTHING_SAID
    ) -> Claims:
        return self._shards[shard].claim(replica, [models] if isinstance(models, str) else models, count, asking)

    async def tick(self, shard: int, replica: str, seen: int, *, renew: bool, list_held: bool) -> Tick:
        return self._shards[shard].tick(replica, seen, renew, list_held)

    async def release(
        self, replica: str, job_id: str, attempt: int | None, last: Position | None, *, is_death: bool = False
    ) -> Written:
        return self._of(job_id).release(replica, job_id, attempt, last, is_death)

    async def cancel(self, job_id: str, cause: str) -> CancelState:
        return self._of(job_id).cancel(job_id, cause)

    async def watch(self, pod: str, job_ids: Sequence[str], *, is_return: bool = False) -> list[bool]:
        return [self._of(job_id).watch(pod, job_id, is_return=is_return) for job_id in job_ids]

    async def unwatch(self, pod: str, leaving: Mapping[str, int | None]) -> None:
        for job_id, grace_ms in leaving.items():
            self._of(job_id).unwatch(pod, job_id, grace_ms)

    async def reap(self, shard: int) -> Reaped:
        return self._shards[shard].reap()

    async def status(self, job_id: str, owner: str | None = None) -> JobStatus | None:
        found = self._of(job_id).status(job_id)
        return found if found and owner in (None, found.view.owner) else None

    async def job(self, job_id: str) -> Job | None:
        return self._of(job_id).job(job_id)

    async def forget(self, job_id: str) -> bool:
        return self._of(job_id).forget(job_id)

    async def dead_letters(self, shard: int, count: int) -> list[DeadLetter]:
        return self._shards[shard].dead_letters(count)

    async def dead_letter(self, job_id: str) -> DeadLetter | None:
        return self._of(job_id).dead_letter(job_id)

    async def expire(self, job_id: str) -> bool:
        return self._of(job_id).expire(job_id)

    async def secret(self, offered: bytes) -> bytes:
        self._secret = self._secret or offered
        return self._secret

    async def stats(self, model: str) -> ModelStats:
        each = [shard.stats(model) for shard in self._shards]
        return ModelStats(
            {band: sum(stats.waiting[band] for stats in each) for band in BANDS},
            max(stats.oldest_ms for stats in each),
            sum(stats.running for stats in each),
            sum(stats.prompt_tokens for stats in each),
            sum(stats.arrived_jobs for stats in each),
            sum(stats.arrived_tokens for stats in each),
            max(stats.replica_starts for stats in each),
            each[0].unplaced,
        )

    async def note_unplaced(self, model: str, why: str) -> None:
        for shard in self._shards:
            shard.note_unplaced(model, why)

    # -- the autoscaler -------------------------------------------------------------------------------------------

    async def note_decision(self, model: str, decision: ScaleDecision) -> None:
        kept, word = self._decisions.setdefault(model, []), f"{decision.direction}:{decision.reason}"
        counts = self._decided.setdefault(model, {})
        counts[word] = counts.get(word, 0) + 1
        if not kept or decision.is_news_after(kept[0]):
            kept.insert(0, decision)
            del kept[MAX_DECISIONS:]

    async def decisions(self, model: str, count: int) -> list[ScaleDecision]:
        return self._decisions.get(model, [])[:count]

    async def decided(self, model: str) -> dict[str, int]:
        return dict(self._decided.get(model, {}))

    # -- the log --------------------------------------------------------------------------------------------------

    def lane(self, shard: int) -> MemoryLane:
        return MemoryLane(self._shards[shard])

    async def last_ids(self, shard: int, job_ids: Sequence[str]) -> list[Position | None]:
        found = [self._shards[shard].find(job_id) for job_id in job_ids]
        return [stored.last if stored else None for stored in found]

    async def read(self, job_id: str, first: Position, count: int) -> list[tuple[Position, bytes]]:
        stored = self._of(job_id).find(job_id)
        log = stored.log if stored else []
        return [entry for entry in log if position(entry[0]) >= position(first)][:count]

    async def read_after(
        self, shard: int, positions: Mapping[str, Position], count: int
    ) -> dict[str, list[tuple[Position, bytes]]]:
        answer: dict[str, list[tuple[Position, bytes]]] = {}
        for job_id, after in positions.items():
            stored = self._shards[shard].find(job_id)
            later = [entry for entry in stored.log if position(entry[0]) > position(after)] if stored else []
            if later:
                answer[job_id] = later[:count]
        return answer

    # -- who is there ---------------------------------------------------------------------------------------------

    def listen_hints(self, pod: str, on_hint: Callable[[bytes], None], on_gap: Callable[[], None]) -> MemoryListener:
        return MemoryListener(self._listeners, ("pod", pod), lambda _, message: on_hint(message), on_gap)

    def listen_wakes(self, replica: str, on_wake: Callable[[int], None]) -> MemoryListener:
        def wake_all() -> None:
            for shard in range(self.shards):
                on_wake(shard)

        return MemoryListener(self._listeners, ("replica", replica), lambda shard, _: on_wake(shard), wake_all)

    async def present(self, kind: Presence, id: str, model: str, about: Mapping[str, str | int]) -> None:
        for shard in self._shards:
            shard.present(kind, id, model, about)

    async def absent(self, kind: Presence, id: str, model: str) -> None:
        for shard in self._shards:
            shard.absent(kind, id, model)

    async def listing(self, kind: Literal["replicas", "pods"]) -> dict[str, dict[str, str]]:
        return self._shards[0].listing(kind)


class MemoryLane:
    """See `protocol.Lane`."""

    def __init__(self, shard: MemoryShard) -> None:
        self._shard = shard

    async def exchange(self, hints: Sequence[Hint], appends: Sequence[Append], settles: Sequence[Settle]) -> Exchange:
        deaf = [hint.pod for hint in hints if not self._shard.publish("pod", hint.pod, encode_hint(hint.entries))]
        added: list[Written] = [self._shard.append(append) for append in appends]
        return Exchange(added, [self._shard.settle(settle) for settle in settles], deaf)

    async def close(self) -> None:
        pass


class MemoryListener:
    """See `protocol.Listener`: it is connected at once, and never loses the connection."""

    def __init__(
        self,
        listeners: dict[tuple[str, str], list[MemoryListener]],
        channel: tuple[str, str],
        on_message: Callable[[int, bytes], None],
        on_connect: Callable[[], None],
    ) -> None:
        self._on_message = on_message
        self._mates = listeners.setdefault(channel, [])
        self._mates.append(self)
        self._later(on_connect)

    def deliver(self, shard: int, message: bytes) -> None:
        self._later(lambda: self._on_message(shard, message))

    def _later(self, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(lambda: call() if self in self._mates else None)

    async def close(self) -> None:
        if self in self._mates:
            self._mates.remove(self)
