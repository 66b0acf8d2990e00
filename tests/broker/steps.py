"""What the contract tests do with a broker again and again, each in one word."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import redis.asyncio as redis

from headrace.broker import keys, messages
from headrace.broker.hints import decode_hint
from headrace.broker.memory import MemoryBroker
from headrace.broker.messages import Delta, Ended, Entry, ReadEntry, Started, Status
from headrace.broker.protocol import Append, Broker, Claim, Exchange, Hint, Listener, Reaped, Settle, Tick, Written
from tests.support import an_admission, eventually
from tests.users import ByUser

MakeBroker = Callable[..., Awaitable[Broker]]

STEP = messages.encode(Entry(7, [Started(3), Delta(0, " hi", [1, 2])]))


async def serve(broker: Broker) -> None:
    await broker.present("cluster", "test", "m", {})


async def admit(broker: Broker, **fields: Any) -> str:
    """A job in the queue; `fields` are those of `an_admission`."""
    await serve(broker)  # it lapses with the short leases of some tests
    admission = an_admission(**fields)
    await broker.admit(admission)
    return admission.job.id


async def claim(broker: Broker, replica: str = "r") -> Claim:
    [claim] = await broker.claim(0, replica, "m", 1)
    return claim


async def claim_ids(broker: Broker, count: int) -> list[str]:
    return [claim.job.id for claim in await broker.claim(0, "r", "m", count)]


async def exchange(
    broker: Broker, hints: Sequence[Hint] = (), appends: Sequence[Append] = (), settles: Sequence[Settle] = ()
) -> Exchange:
    """One round trip on a lane of its own."""
    lane = broker.lane(0)
    try:
        return await lane.exchange(hints, appends, settles)
    finally:
        await lane.close()


async def append(broker: Broker, job_id: str, entry_id: str) -> Written:
    [written] = (await exchange(broker, appends=[Append(job_id, entry_id, STEP)])).appends
    return written


def an_end(job_id: str, attempt: int = 1, last: str = "1-0", status: Status = "done") -> Settle:
    return Settle(job_id, attempt, last, messages.encode(Entry(9, [Ended(status)])), status)


async def settle(broker: Broker, job_id: str, attempt: int, last: str, status: Status = "done") -> Written:
    [written] = (await exchange(broker, settles=[an_end(job_id, attempt, last, status)])).settles
    return written


async def finish(broker: Broker) -> str:
    """Admit, claim and settle a job, before all others that wait."""
    job_id = await admit(broker, band="interactive")
    assert (await claim(broker)).job.id == job_id
    assert await settle(broker, job_id, 1, "1-0") == "ok"
    return job_id


async def tick(broker: Broker, replica: str = "r", seen: int = 0, renew: bool = False, list_held: bool = False) -> Tick:
    return await broker.tick(0, replica, seen, renew=renew, list_held=list_held)


async def reap(broker: Broker) -> Reaped:
    """Reap while the model is still served, which the short leases of these tests would else end."""
    await serve(broker)
    return await broker.reap(0)


async def lose_worker(broker: Broker) -> None:
    """Wait until the one running job's lease has run out and was taken back."""

    async def is_taken_back() -> bool:
        return (await reap(broker)).leases == 1

    await eventually(is_taken_back)


async def last_id(broker: Broker, job_id: str) -> str | None:
    [last] = await broker.last_ids(keys.shard_of(job_id), [job_id])
    return last


async def log_of(broker: Broker, job_id: str) -> list[ReadEntry]:
    rows = await broker.read(job_id, "0-1", 1000)
    return [messages.decode_entry(entry_id, data) for entry_id, data in rows]


def tokens_of(entries: Sequence[ReadEntry]) -> list[int]:
    return [
        token_id
        for entry in entries
        for event in entry.events
        if isinstance(event, Delta)
        for token_id in event.token_ids
    ]


async def ids_of(broker: Broker, job_id: str) -> list[str]:
    return [entry.id for entry in await log_of(broker, job_id)]


async def end_of(broker: Broker, job_id: str) -> tuple[str, str, str]:
    """Position, status and error code of the log's last entry, which is the only terminal one."""
    entries = await log_of(broker, job_id)
    ends = [event for entry in entries for event in entry.events if isinstance(event, Ended)]
    assert entries[-1].is_end
    assert len(ends) == 1
    return entries[-1].id, ends[0].status, ends[0].error.code if ends[0].error else ""


async def state_of(broker: Broker, job_id: str) -> str:
    status = await broker.status(job_id)
    return status.state if status else "unknown"


async def lose_log(broker: Broker, job_id: str) -> None:
    """What a failover may do: the job and its log are not there any more."""
    if isinstance(broker, MemoryBroker):
        del broker._of(job_id)._jobs[job_id]
    elif isinstance(broker, ByUser):
        async with redis.Redis.from_url(broker.root_url, protocol=2) as root:
            await root.delete(keys.key("job", 0, job_id), keys.key("log", 0, job_id))


def unknown_id() -> str:
    return keys.new_job_id(1)


class Pod:
    """A pod's ear: everything that was said to it, in order."""

    def __init__(self) -> None:
        self.heard: list[Append] = []
        self.gaps = 0

    def on_hint(self, message: bytes) -> None:
        self.heard += decode_hint(message)

    def on_gap(self) -> None:
        self.gaps += 1

    @property
    def ids(self) -> list[str]:
        return [entry.entry_id for entry in self.heard]


class Ears:
    """Subscriptions that are closed at the end of the test."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []

    async def pod(self, broker: Broker, name: str) -> Pod:
        pod = Pod()
        self.listeners.append(broker.listen_hints(name, pod.on_hint, pod.on_gap))
        await eventually(lambda: pod.gaps == 1)
        return pod

    async def replica(self, broker: Broker, name: str) -> list[int]:
        """The shards that the replica is woken for, without those of the connection itself."""
        woken: list[int] = []
        self.listeners.append(broker.listen_wakes(name, woken.append))
        await eventually(lambda: len(woken) == broker.shards)
        woken.clear()
        return woken
