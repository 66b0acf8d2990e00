"""The seam between the rooms and Redis: every verb of a job's life, and what each is told and answers.

Two classes keep this promise, under one contract suite (`tests/broker/test_contract.py`): `redis_broker.RedisBroker`,
and `memory.MemoryBroker` for programs and tests without a server. Every verb is safe to repeat. All raise `BrokerDown`
when the broker cannot be reached or cannot do it now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from headrace.broker.ledger import Ledger
from headrace.broker.limits import Allowance, Standing
from headrace.broker.messages import Job, ScaleDecision, Status, View

Position = str
"""`<attempt>-<n>`: where an entry stands in its log."""

MAX_DECISIONS = 200
"""So many of a model's autoscaling decisions are kept."""

Written = Literal["ok", "stale", "gone", "behind"]
"""What became of a write: done; another attempt owns the log; no such job; the log ends elsewhere than told."""


class Share(Struct, frozen=True):
    """What an owner may have of a queue: its weight against other owners, and bounds of what waits."""

    weight: float = 1.0
    max_waiting_jobs: int | None = None
    max_waiting_bytes: int | None = None
    max_waiting_tokens: int | None = None


class Admission(Struct, frozen=True):
    """A job on its way in. `pod` becomes its first reader; `grace_ms` -1 means that it runs also if nobody reads.

    `prompt_tokens` and `cost_tokens` (those and what is generated) are estimates. `queue_timeout_ms` None is the
    deployment's `queue_timeout_s`. `is_kept`: from its end the job, its spec too, lives for `stored_ttl_s`.
    `prefix` are the anchors of its prompt (`prefixes.anchors`).
    """

    job: Job
    view: View
    pod: str | None = None
    grace_ms: int = -1
    prompt_tokens: int = 0
    cost_tokens: int = 256
    share: Share = Share()
    queue_timeout_ms: int | None = None
    is_kept: bool = False
    prefix: bytes = b""
    allowance: Allowance | None = None
    """The limits of its key, if it has any; the job must then be on its owner's home shard."""
    digest: str = ""
    """Of the request as it came, and of its owner: if it ends as a dead letter, the like is refused for an hour."""


class Admitted(Struct, frozen=True):
    """`is_new` False: a job of this id was there already, and nothing was enqueued.

    `enqueued_ms` is what the log's first entry says, so that the admitting pod need not read it; only if it is new.
    """

    is_new: bool
    last: Position
    enqueued_ms: int = 0
    standing: Standing = Standing()


class Claim(Struct, frozen=True):
    """A job leased to this replica: attempt `attempt` is open, and continues from the entry `after`.

    `fresh_tokens` of its prompt are to be prefilled, as estimated: the replica is thought to hold the others.
    """

    job: Job
    attempt: int
    after: Position
    waited_ms: int
    readers: list[str]
    prefix: bytes = b""
    fresh_tokens: int = 0


class Claims(list[Claim]):
    """What a replica got. Jobs that were left to another one, which holds more of their prompts, are anybody's after
    `again_ms` at the earliest; None: there are none. A replica that got less than it asked for `is_idle`: it is told of
    the next job."""

    again_ms: int | None = None
    is_idle: bool = False


class Asking(Struct, frozen=True):
    """What a replica says of itself when it asks for jobs: all that is known of its cache and its pace.

    `enough_tokens` of prompts are enough, however few jobs they are (None: all that it asks for). It prefills
    `bytes_per_s` of prompts, 0 if that is not known: it leaves no job to another replica then. `dropped` are anchors of
    prompts that it has served and holds no more.
    """

    enough_tokens: int | None = None
    bytes_per_s: int = 0
    dropped: bytes = b""


NOTHING_SAID = Asking()


class News(Struct, frozen=True):
    """What changed about a job that this replica ran: `attempt` None says that the lease is gone."""

    job_id: str
    attempt: int | None
    cancel: str
    readers: list[str]


class Tick(Struct, frozen=True):
    """`serial` is to be sent with the next tick; `held` counts this replica's leases; `jobs` lists them if asked."""

    serial: int
    held: int
    news: list[News]
    jobs: list[str]


class Append(Struct, frozen=True, array_like=True, gc=False):
    """One entry on its way into a log.

    `usage` comes with the entry that finishes a job's last choice: the msgpack of its `Usage`. Only the end is missing
    then, and scripts, which cannot read every entry, can write it if the worker is lost.
    """

    job_id: str
    entry_id: Position
    data: bytes
    usage: bytes = b""


class Settle(NamedTuple):
    """The terminal entry: it is appended after `last`, which must be the writer's last entry."""

    job_id: str
    attempt: int
    last: Position
    data: bytes
    status: Status


class Hint(NamedTuple):
    """Entries that the log has acknowledged, for one pod that reads their jobs."""

    pod: str
    entries: Sequence[Append]


class Exchange(Struct, frozen=True):
    """The answers to one round trip, in the order of what was sent; `deaf` pods have no connection."""

    appends: list[Written]
    settles: list[Written]
    deaf: list[str]


class Reaped(Struct, frozen=True):
    """How many jobs each kind of overdue time has moved or ended."""

    leases: int
    unread: int
    timeouts: int
    no_capacity: int
    overrun: int = 0


class ModelStats(Struct, frozen=True):
    """One model now: `waiting` per band, age of the oldest waiting job in ms, running jobs, prompt tokens that wait.

    `arrived_jobs` and `arrived_tokens` (of prompts) were ever admitted, and `replica_starts` replicas have come (one
    whose presence had lapsed counts again); all three begin anew after a long silence.
    `unplaced` says why it has no replica, if the cluster cannot place one.
    """

    waiting: dict[str, int]
    oldest_ms: int
    running: int
    prompt_tokens: int = 0
    arrived_jobs: int = 0
    arrived_tokens: int = 0
    replica_starts: int = 0
    unplaced: str = ""


class JobStatus(Struct, frozen=True):
    """One job now; `ahead` counts the jobs before it in the queue, None if it does not wait; `resumes` the readers that
    came after its first."""

    view: View
    state: Literal["waiting", "running", "done", "cancelled", "failed"]
    last: Position
    attempt: int
    ahead: int | None
    deaths: int
    resumes: int = 0


class DeadLetter(Struct, frozen=True):
    """A job that lost too many workers, kept whole.

    `died_of` says how it lost the last, `worker_lost` or `engine_hung`, and `died_with` which one that was.
    """

    job: Job
    view: View
    deaths: int
    died_ms: int
    died_of: str
    died_with: str


class Lane(Protocol):
    """A replica's one ordered connection to a shard: what is sent first is done first."""

    async def exchange(self, hints: Sequence[Hint], appends: Sequence[Append], settles: Sequence[Settle]) -> Exchange:
        """Send all of it at once and wait for the answers; several appends of one job are in their order.

        Raises BrokerDown if any answer is not known: the writer then asks each log for its last id.
        """
        ...

    async def close(self) -> None: ...


class Listener(Protocol):
    """A subscription; it connects again by itself."""

    async def close(self) -> None: ...


class Broker(Protocol):
    """Redis, or what stands in for it."""

    shards: int
    ledger: Ledger

    async def open(self) -> None:
        """Connect and check the server; raises ConfigError if it would lose logs, BrokerDown if it is not there."""
        ...

    async def close(self) -> None: ...

    async def ping(self) -> float:
        """Answer the share of memory in use, 0 to 1 (0 where no limit is set)."""
        ...

    # -- a job's life ---------------------------------------------------------------------------------------------

    async def admit(self, admission: Admission) -> Admitted:
        """Store and queue a job; raises LimitReached, QueueFull, OwnerQueueFull or NoCapacity: nothing is stored then.

        A full queue ends the youngest batch jobs to take one that is not batch.
        """
        ...

    async def claim(
        self, shard: int, replica: str, models: str | Sequence[str], count: int, asking: Asking = NOTHING_SAID
    ) -> Claims:
        """Lease up to `count` jobs of a model, or of several; fewer enter the replica as idle, to be woken by the next.

        By band, and in a band by model as they are given, and fairly between owners by weight and cost; the jobs of one
        owner in order of age, but for those whose prompt's beginning this replica holds (`affinity.py`).
        """
        ...

    async def tick(self, shard: int, replica: str, seen: int, *, renew: bool, list_held: bool) -> Tick: ...

    async def release(
        self, replica: str, job_id: str, attempt: int | None, last: Position | None, *, is_death: bool = False
    ) -> Written:
        """Give a job back to the front; `attempt` None is for a lease that the replica did not know it had."""
        ...

    async def cancel(self, job_id: str, cause: str) -> Literal["waiting", "running", "ended", "unknown"]: ...

    async def watch(self, pod: str, job_ids: Sequence[str], *, is_return: bool = False) -> list[bool]:
        """Open or renew reading leases; False for each job that is not there.

        `is_return`: a reader has come to each of them that is not its first; `status` counts those.
        """
        ...

    async def unwatch(self, pod: str, leaving: Mapping[str, int | None]) -> None:
        """End reading leases, by job: the grace in ms that the reader asked for, None for the job's own."""
        ...

    async def reap(self, shard: int) -> Reaped:
        """Act on all overdue times. If nobody did for most of a lease, there is a lease time to renew in first."""
        ...

    async def status(self, job_id: str, owner: str | None = None) -> JobStatus | None:
        """Where a job is; None if there is none, or none of this owner, which takes as long to find out."""
        ...

    async def job(self, job_id: str) -> Job | None:
        """What a job asks for: until its end, and as long as it is known if it is kept; else None."""
        ...

    async def forget(self, job_id: str) -> bool:
        """Let nobody find a job any more, and cancel it if it has not ended; False if there is none.

        Who reads it already reads on to its end.
        """
        ...

    async def dead_letters(self, shard: int, count: int) -> list[DeadLetter]:
        """Up to `count` dead letters, those that died last first."""
        ...

    async def dead_letter(self, job_id: str) -> DeadLetter | None: ...

    async def expire(self, job_id: str) -> bool:
        """Keep a dead letter no longer; False if there is none."""
        ...

    async def secret(self, offered: bytes) -> bytes:
        """The deployment's secret: what is stored, and lives on for that, or else `offered`, which is stored then."""
        ...

    async def stats(self, model: str) -> ModelStats: ...

    async def note_unplaced(self, model: str, why: str) -> None:
        """Say why the cluster cannot place a model's replicas, or with '' that it can; it lapses after `lease_s`.

        It is what NoCapacity says then; whether there is capacity, only presence says.
        """
        ...

    # -- the autoscaler -------------------------------------------------------------------------------------------

    async def note_decision(self, model: str, decision: ScaleDecision) -> None:
        """Count a decision, and keep it for `decisions` if it changed something or differs from the last one kept."""
        ...

    async def decisions(self, model: str, count: int) -> list[ScaleDecision]:
        """The last decisions that were kept, newest first."""
        ...

    async def decided(self, model: str) -> dict[str, int]:
        """How often each `<direction>:<reason>` was decided."""
        ...

    # -- the log --------------------------------------------------------------------------------------------------

    def lane(self, shard: int) -> Lane: ...

    async def last_ids(self, shard: int, job_ids: Sequence[str]) -> list[Position | None]:
        """The last entry of each log, in one round trip; None where there is no log."""
        ...

    async def read(self, job_id: str, first: Position, count: int) -> list[tuple[Position, bytes]]:
        """Entries from `first` on, `first` included."""
        ...

    async def read_after(
        self, shard: int, positions: Mapping[str, Position], count: int
    ) -> dict[str, list[tuple[Position, bytes]]]:
        """For many logs of a shard in one round trip: up to `count` entries after each position; silent ones absent."""
        ...

    # -- who is there ---------------------------------------------------------------------------------------------

    def listen_hints(self, pod: str, on_hint: Callable[[bytes], None], on_gap: Callable[[], None]) -> Listener:
        """Call `on_hint` with each message for this pod, and `on_gap` after each new connection."""
        ...

    def listen_wakes(self, replica: str, on_wake: Callable[[int], None]) -> Listener:
        """Call `on_wake` with the shard that has work, and with every shard after each new connection."""
        ...

    async def present(
        self, kind: Literal["replicas", "pods", "cluster"], id: str, model: str, about: Mapping[str, str | int]
    ) -> None:
        """Say that a replica, a pod, or a cluster that will start replicas is there; it lapses after `lease_s`."""
        ...

    async def absent(self, kind: Literal["replicas", "pods", "cluster"], id: str, model: str) -> None: ...

    async def listing(self, kind: Literal["replicas", "pods"]) -> dict[str, dict[str, str]]:
        """Everything that is present, by id."""
        ...
