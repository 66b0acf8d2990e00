"""The token log, read live: many readers in a pod, over a fixed small number of connections.

The log is the truth, a hint makes it fast. A reader applies a hint only if it follows its position without a gap; else
it reads the log. Twice a second the logs of all silent readers are asked in one round trip a shard, since the last hint
may have been lost. A reader keeps only a few entries: one whose client is slow falls behind and reads the log later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from typing import Literal

from headrace.broker import keys, messages
from headrace.broker.errors import BrokerDown, HeadraceError, JobNotFound, LogGap, LogLost
from headrace.broker.hints import decode_hint
from headrace.broker.messages import Claimed, Queued, ReadEntry
from headrace.broker.protocol import Admitted, Append, Broker, Listener, Position
from headrace.broker.tasks import cancel_all

log = logging.getLogger(__name__)

START = "0-0"
"""The position before the first entry."""

REPAIR_S = 2.0
"""How long a worker that lives may take to write again what the server has lost."""
_PAGE = 256
_KEEP = 256  # entries that a reader holds for its client before it leaves the rest to the log
_CHUNK = 512  # readers asked about in one round trip


def follow(position: Position, entry: ReadEntry) -> Literal["next", "old", "gap", "lost"]:
    """How an entry stands to a reader at `position`: see the design's rule for hints and for the log itself."""
    attempt, n = keys.position(entry.id)
    own_attempt, own_n = keys.position(position)
    if (attempt, n) <= (own_attempt, own_n):
        return "old"
    if attempt == own_attempt:
        return "next" if n == own_n + 1 else "gap"
    first = entry.events[0] if entry.events else None
    if n != 0:
        return "gap"
    if not isinstance(first, Claimed):
        return "next"
    after = keys.position(first.after)
    if after == (own_attempt, own_n):
        return "next"
    return "gap" if after > (own_attempt, own_n) else "lost"


class Reader:
    """One client's place in one log."""

    def __init__(self, tail: Tail, job_id: str, position: Position) -> None:
        self.job_id = job_id
        self.position = position
        """The last entry that was taken in; what is kept for the client ends there."""
        self.is_behind = position == START
        self.is_silent = True
        self.sink: Callable[[ReadEntry], bool] | None = None
        """Who takes an entry the moment it comes, while nothing is kept and `read` waits; False leaves it to `read`."""
        self._tail = tail
        self._attempt, self._n, self._next_id = "", 0, ""
        self._kept: list[ReadEntry] = []
        self._error: HeadraceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.is_ended = False
        """It has taken the log's last entry."""
        self._is_poked = False
        self._missing_since: float | None = None
        self._passed_over = START
        """The last entry hinted at while the log was being read; the page may have been cut before it."""

    @property
    def kept(self) -> int:
        """Entries that are here for the client, which has not taken them yet."""
        return len(self._kept)

    async def read(self) -> list[ReadEntry]:
        """The next entries, or none if `poke` was called; after a log's end nothing may be asked for.

        Raises LogLost or LogGap when the log cannot be continued, JobNotFound when it was never there.
        """
        while True:
            if self._kept:
                return self.take()
            if self._error is not None:
                raise self._error
            if self._is_poked:
                self._is_poked = False
                return []
            if self.is_behind:
                await self._catch_up()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take(self) -> list[ReadEntry]:
        """The entries that are here by now, if any."""
        entries, self._kept = self._kept, []
        return entries

    def offer(self, entry: ReadEntry) -> None:
        """Take a hint in, if it is the next entry; any other makes the reader read the log."""
        self.is_silent = False
        if self.is_ended:
            return
        if self.is_behind:
            self._passed_over = max(self._passed_over, entry.id, key=keys.position)
            return
        is_next = entry.id == self._next_id
        if not is_next:
            how = follow(self.position, entry)
            if how == "old":
                return
            is_next = how == "next" and self._is_proven(entry)
        if is_next and len(self._kept) < _KEEP:
            if self._is_taken(entry):
                return
            self._kept.append(entry)
        else:
            self.is_behind = True
        self.wake()

    def begin(self, first: ReadEntry) -> None:
        """Take the log's first entry as known; what follows comes as hints."""
        self._take(first)
        self.is_behind = False

    def poke(self) -> None:
        """Make `read` answer now, with nothing if there is nothing: it is time for a heartbeat, say."""
        self._is_poked = True
        self.wake()

    def fail(self, error: HeadraceError) -> None:
        """Make `read` raise, once the entries that are here are taken."""
        if not self.is_ended and self._error is None:
            self._error = error
            self.wake()

    @staticmethod
    def _is_proven(entry: ReadEntry) -> bool:
        """An end that opens an attempt does not say what it follows; only the log can."""
        return not entry.id.endswith("-0") or isinstance(entry.events[0], Claimed)

    def _is_taken(self, entry: ReadEntry) -> bool:
        """Be at this entry; True if the sink has taken it."""
        if entry.id == self._next_id:
            self._n += 1
        else:
            self._attempt, _, n = entry.id.partition("-")
            self._n = int(n)
        self.position, self._next_id = entry.id, f"{self._attempt}-{self._n + 1}"
        self.is_ended = entry.is_end
        if self.is_ended or self.sink is None or self._kept or self._waiter is None or self._waiter.done():
            return False
        try:
            return self.sink(entry)
        except Exception as error:  # of one reader; the hints of the others go on
            self.fail(error if isinstance(error, HeadraceError) else HeadraceError())
            said = {"event": "reader_broke", "request_id": self.job_id}
            log.exception("a reader of job %s broke", self.job_id, extra=said)
            return True

    def _take(self, entry: ReadEntry) -> None:
        if not self._is_taken(entry):
            self._kept.append(entry)

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _catch_up(self) -> None:
        """Read a page of the log from the position on; the position itself comes first and proves that it is there."""
        self._passed_over = START  # what was hinted at before is in the page, or the log has lost it
        try:
            rows = await self._tail.broker.read(self.job_id, self.position, _PAGE)
        except BrokerDown:
            await asyncio.sleep(random.uniform(0.1, 0.3))
            return
        if self.position == START:
            if not rows:
                raise JobNotFound
        elif not rows:
            await self._wait_for_repair()
            return
        elif rows[0][0] != self.position:
            raise LogLost
        else:
            rows, self._missing_since = rows[1:], None
        for entry in _decode(rows):
            self._take_in_order(entry)
        is_newer = keys.position(self._passed_over) > keys.position(self.position)
        self.is_behind = not self.is_ended and (len(rows) >= _PAGE - 1 or is_newer)

    async def _wait_for_repair(self) -> None:
        """The log ends before the position: a server that has lost its end may get it again from the worker."""
        now = time.monotonic()
        self._missing_since = self._missing_since or now
        if now - self._missing_since > REPAIR_S:
            raise LogLost
        await asyncio.sleep(random.uniform(0.05, 0.15))

    def _take_in_order(self, entry: ReadEntry) -> None:
        match follow(self.position, entry):
            case "next" if self.position != START or entry.id == "0-1":
                self._take(entry)
            case "lost":
                raise LogLost
            case _:
                raise LogGap


class Tail:
    """All readers of a pod. `pod` is its id, new at each start."""

    def __init__(self, broker: Broker, pod: str, reader_lease_s: float) -> None:
        self.broker = broker
        self.pod = pod
        self._lease_s = reader_lease_s
        self._readers: dict[str, set[Reader]] = {}
        self._leases = asyncio.Lock()
        self._leaving: dict[str, int | None] = {}
        self._leave_now = asyncio.Event()
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._listener = self.broker.listen_hints(self.pod, self._on_hint, self._on_gap)
        for loop in (self._renew, self._ask_silent, self._leave):
            self._tasks.append(asyncio.create_task(_forever(loop), name=f"tail {loop.__name__}"))

    async def close(self) -> None:
        await cancel_all(self._tasks)
        if self._listener is not None:
            await self._listener.close()
        with contextlib.suppress(BrokerDown):
            await self._unwatch()

    @property
    def readers(self) -> int:
        return sum(map(len, self._readers.values()))

    def open_admitted(self, job_id: str, admitted: Admitted) -> Reader:
        """A reader of a job that this pod has just admitted, and so holds a reading lease of already."""
        reader = self.open(job_id, START)
        if admitted.is_new:
            reader.begin(ReadEntry(admitted.last, 0, [Queued(admitted.enqueued_ms)]))
        return reader

    def open(self, job_id: str, position: Position) -> Reader:
        """A reader of what comes after a position, under a reading lease that this pod holds already."""
        reader = Reader(self, job_id, position)
        self._readers.setdefault(job_id, set()).add(reader)
        return reader

    async def attach(self, job_id: str) -> Reader:
        """A reader from the first entry on; raises JobNotFound if there is no such job."""
        reader = self.open(job_id, START)
        try:
            async with self._leases:
                found = await self.broker.watch(self.pod, [job_id], is_return=True)
        except BaseException:
            self.close_reader(reader, None)
            raise
        if not found[0]:
            self._forget(reader)
            raise JobNotFound
        return reader

    def fail_all(self, error: HeadraceError) -> None:
        """End every stream here with an error."""
        for readers in self._readers.values():
            for reader in readers:
                reader.fail(error)

    def close_reader(self, reader: Reader, grace_ms: int | None) -> None:
        """The client left; the pod's reading lease ends with its last reader, within milliseconds.

        Of a job that has ended it means nothing any more, and runs out by itself.
        """
        if self._forget(reader) and not reader.is_ended:
            self._leaving[reader.job_id] = grace_ms
            self._leave_now.set()

    def abandon(self, reader: Reader) -> None:
        """Read no more, but let the reading lease run out by itself: the client may come back to another pod."""
        self._forget(reader)

    def _forget(self, reader: Reader) -> bool:
        """Drop a reader; True if it was the job's last here."""
        readers = self._readers.get(reader.job_id, set())
        readers.discard(reader)
        if readers:
            return False
        return self._readers.pop(reader.job_id, None) is not None

    # -- hints ----------------------------------------------------------------------------------------------------

    def _on_hint(self, message: bytes) -> None:
        for append in decode_hint(message):
            readers = self._readers.get(append.job_id)
            if readers:
                self._offer(readers, append)

    @staticmethod
    def _offer(readers: Iterable[Reader], append: Append) -> None:
        entry = messages.decode_entry(append.entry_id, append.data)
        for reader in readers:
            reader.offer(entry)

    def _on_gap(self) -> None:
        """The subscription is new: what was said before it is in the logs."""
        for readers in self._readers.values():
            for reader in readers:
                reader.is_behind = True
                reader.wake()

    # -- loops ----------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        await self._leave_now.wait()
        async with self._leases:
            self._leave_now.clear()
            await self._unwatch()

    async def _unwatch(self) -> None:
        """End the leases of jobs that nobody here reads any more; some may have found a reader since."""
        leaving = {job_id: grace_ms for job_id, grace_ms in self._leaving.items() if job_id not in self._readers}
        self._leaving = {}
        try:
            if leaving:
                await self.broker.unwatch(self.pod, leaving)
        except BrokerDown:
            self._leaving = {**leaving, **self._leaving}
            self._leave_now.set()
            raise

    async def _renew(self) -> None:
        for job_ids in _chunks(list(self._readers)):
            async with self._leases:
                job_ids = [job_id for job_id in job_ids if job_id in self._readers]
                found = await self.broker.watch(self.pod, job_ids) if job_ids else []
            for job_id, is_there in zip(job_ids, found, strict=True):
                if not is_there:
                    for reader in self._readers.get(job_id, ()):
                        reader.fail(LogLost())
        await asyncio.sleep(self._lease_s / 3)

    async def _ask_silent(self) -> None:
        await asyncio.sleep(random.uniform(0.4, 0.6))
        silent: dict[int, dict[str, Position]] = {}
        for job_id, readers in self._readers.items():
            asking = [reader.position for reader in readers if reader.is_silent and not reader.is_behind]
            if asking:  # one question for all of them: to those that are further on the answer is old
                silent.setdefault(keys.shard_of(job_id), {})[job_id] = min(asking, key=keys.position)
            for reader in readers:
                reader.is_silent = True
        for shard, positions in silent.items():
            for job_ids in _chunks(list(positions)):
                await self._ask(shard, {job_id: positions[job_id] for job_id in job_ids})

    async def _ask(self, shard: int, positions: dict[str, Position]) -> None:
        for job_id, rows in (await self.broker.read_after(shard, positions, _PAGE)).items():
            for entry_id, data in rows:
                if readers := self._readers.get(job_id):
                    self._offer(readers, Append(job_id, entry_id, data))


def _decode(rows: Sequence[tuple[Position, bytes]]) -> list[ReadEntry]:
    return [messages.decode_entry(entry_id, data) for entry_id, data in rows]


def _chunks(items: list[str]) -> Iterable[list[str]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


async def _forever(turn: Callable[[], Awaitable[None]]) -> None:
    while True:
        try:
            await turn()
        except BrokerDown:
            await asyncio.sleep(random.uniform(0.2, 0.5))
        except Exception:  # the edge of a loop: readers still have the log
            log.exception("a loop of the tail broke and goes on", extra={"event": "loop_broke"})
            await asyncio.sleep(1.0)
