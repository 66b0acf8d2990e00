"""The token log, written: each replica has one writer a shard, with one batch in flight.

What engines yield while a batch is under way is the next batch, with at most one entry a job. Only what the log has
acknowledged is shown: the hints of a batch go out at the head of the next round trip, in order, on the same connection.
After a break the writer asks each log where it stands, and sends again from there or stops.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from headrace.broker import keys, messages, metrics, rhythm
from headrace.broker.errors import BrokerDown, BrokerFull
from headrace.broker.messages import Ended, Entry, Event, Failure, Started, Usage
from headrace.broker.outage import Outage
from headrace.broker.protocol import Append, Broker, Hint, Position, Settle, Written
from headrace.broker.rhythm import Rhythm

log = logging.getLogger(__name__)

_EARLY = 2
"""The first entries of an attempt are shown at once; the second is its first token, if `Started` went alone."""
_MUTE_S = 1.0
_AT_ONCE = 100
"""Logs that are asked, or entries that are sent again, in one round trip after a break."""
_FULL_S = 5.0
"""How long running jobs wait for room in a full broker before they end."""
_RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def _tell_nobody(*_: object) -> None:
    """In place of the owner of a track that is closed, which would stay with it until Python's next collection."""


class Track:
    """One attempt's place in one log. Events are appended without waiting; `on_lost` says that it is ours no more."""

    def __init__(
        self,
        writer: LogWriter,
        job_id: str,
        attempt: int,
        age_ms: int,
        readers: Iterable[str],
        on_lost: Callable[[], None],
    ) -> None:
        self.job_id = job_id
        self.attempt = attempt
        self.readers = set(readers)
        self.sent: list[bytes] = []
        """Entries of this attempt from n = 1 on, kept until it is settled: the log may ask for them again."""
        self.acked = 0
        """n of the last entry that the log has acknowledged."""
        self.pending: list[Event] = []
        self.usage: Usage | None = None
        self.finished_n = 0
        """n of the entry that has the usage; 0 before there is one."""
        self.ending: Ended | None = None
        self.settled: asyncio.Future[Written] | None = None
        self.is_lost = False
        self._moved: asyncio.Event | None = None
        """Of who waits in `clear`, if somebody does."""
        self.on_lost = on_lost
        self.on_full: Callable[[BrokerFull], None] = lambda _: None
        self._writer = writer
        self._enqueued_at = time.monotonic() - age_ms / 1000

    @property
    def age_ms(self) -> int:
        """Milliseconds since the job was enqueued, by the broker's clock at the claim and ours since."""
        return self.age_ms_at(time.monotonic())

    def age_ms_at(self, now: float) -> int:
        return int((now - self._enqueued_at) * 1000)

    @property
    def last(self) -> Position:
        """The last acknowledged entry."""
        return f"{self.attempt}-{self.acked}"

    @property
    def is_clear(self) -> bool:
        """Everything appended so far is acknowledged."""
        return not self.pending and self.acked == len(self.sent)

    async def clear(self) -> None:
        """Wait until everything is acknowledged, or the log is ours no more."""
        while not self.is_clear and not self.is_lost:
            self._moved = self._moved or asyncio.Event()
            self._moved.clear()
            await self._moved.wait()

    def moved(self) -> None:
        """The log has answered: whoever waits in `clear` looks again."""
        if self._moved is not None:
            self._moved.set()

    def append(self, events: Iterable[Event], *, is_urgent: bool = False, usage: Usage | None = None) -> None:
        """Write these after all others; `usage` comes with what finishes the job's last choice."""
        if not self.is_lost:
            self.pending.extend(events)
            self.usage = usage or self.usage
            self._writer.wake(self, is_urgent=is_urgent)

    def begin(self, started: Started) -> None:
        """Write this with the first step, if that comes within a pace: else that would have to wait for its answer."""
        if not self.is_lost:
            self.pending.append(started)
            self._writer.wake_late(self)

    def settle(self, ended: Ended) -> asyncio.Future[Written]:
        """Append the terminal entry after all others; the answer says whether it is ours that stands."""
        self.settled = asyncio.get_running_loop().create_future()
        if self.is_lost:
            self.settled.set_result("stale")
        else:
            self.ending = ended
            self._writer.wake(self, is_urgent=True)
        return self.settled

    def refuse(self, error: BrokerFull) -> None:
        """The broker has no room for what the log lacks: it is dropped, and the job ends as failed after what is there.

        The terminal entry itself is always taken.
        """
        is_whole = self.is_clear
        del self.sent[self.acked :]
        self.pending.clear()
        self.moved()
        if self.ending is None:
            self.on_full(error)
        elif not is_whole:
            self.ending = Ended("failed", Failure(error.code, error.message), self.ending.usage, self.ending.timings)

    def lose(self, how: Written) -> None:
        """Another attempt owns the log, or it is gone: nothing of this track is written or shown any more."""
        if self.is_lost:
            return
        self.is_lost = True
        self.pending.clear()
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(how)
        self.moved()
        self.on_lost()


class LogWriter:
    """See the module. `run` is the one task that talks to the shard; it ends when it is cancelled.

    Batches follow each other no faster than `pace_s`, see `rhythm`.
    """

    def __init__(self, broker: Broker, shard: int, pace_s: float = 0.0) -> None:
        self._rhythm = Rhythm(pace_s)
        self._broker = broker
        self._shard = shard
        self._lane = broker.lane(shard)
        self._ready: dict[str, Track] = {}
        self._hints: dict[str, list[Append]] = {}
        self._muted: dict[str, float] = {}
        """Pods that had no connection when they were last told, by the time until which they are told nothing."""
        self._tracks: dict[str, Track] = {}
        self._outage = Outage(log, "append_failed", "the logs cannot be written")

    def open(
        self,
        job_id: str,
        attempt: int,
        age_ms: int,
        readers: Iterable[str],
        on_lost: Callable[[], None],
        on_full: Callable[[BrokerFull], None] = lambda _: None,
    ) -> Track:
        """Begin to write an attempt whose `<attempt>-0` the claim has appended; an earlier one here is lost by it."""
        if (former := self._tracks.get(job_id)) is not None:
            former.lose("stale")
        track = self._tracks[job_id] = Track(self, job_id, attempt, age_ms, readers, on_lost)
        track.on_full = on_full
        return track

    def close_track(self, track: Track) -> None:
        """Nothing of it is written from now on, and nobody is told of it."""
        track.on_lost, track.on_full = _tell_nobody, _tell_nobody
        if self._tracks.get(track.job_id) is track:
            del self._tracks[track.job_id]
        if self._ready.get(track.job_id) is track:
            del self._ready[track.job_id]

    def wake(self, track: Track, *, is_urgent: bool = True) -> None:
        self._ready[track.job_id] = track
        self._rhythm.ask(rhythm.NOW if is_urgent else self._rhythm.entries_at)

    def wake_late(self, track: Track) -> None:
        self._ready[track.job_id] = track
        self._rhythm.ask(self._rhythm.late_at(time.monotonic()))

    async def run(self) -> None:
        try:
            while True:
                await self._rhythm.wake.wait()
                try:
                    await self._flush()
                except BrokerDown as error:
                    self._outage.down(error)
                    await self._resync()
                    self._outage.up()
        finally:
            await self._lane.close()

    async def _flush(self) -> None:
        tracks, hints = list(self._ready.values()), self._hints
        self._ready, self._hints = {}, {}
        now = time.monotonic()
        writers = [track for track in tracks if track.pending and not track.is_lost]
        self._rhythm.begin(now, has_entries=bool(writers))
        appends = [self._take(track, now) for track in writers]
        enders = [track for track in tracks if track.ending is not None and track.is_clear and not track.is_lost]
        started = time.perf_counter()
        answers = await self._lane.exchange(
            [Hint(pod, entries) for pod, entries in hints.items()],
            appends,
            [Settle(t.job_id, t.attempt, t.last, _encode_end(t), _ending(t).status) for t in enders],
        )
        if appends:
            metrics.APPEND_SECONDS.observe(time.perf_counter() - started)
        self._muted = {pod: until for pod, until in self._muted.items() if until > started}
        self._muted.update(dict.fromkeys(answers.deaf, started + _MUTE_S))
        for track, append, written in zip(writers, appends, answers.appends, strict=True):
            if written == "ok":
                self._acknowledged(track, append)
            elif not track.is_lost:
                await self._agree([track])
        for track, written in zip(enders, answers.settles, strict=True):
            await self._settled(track, written)

    def _take(self, track: Track, now: float) -> Append:
        """All that waits for a job becomes its next entry."""
        data = messages.encode(Entry(track.age_ms_at(now), track.pending))
        track.pending = []
        track.sent.append(data)
        if track.usage is not None and not track.finished_n:
            track.finished_n = len(track.sent)
        return self._entry(track, len(track.sent))

    def _acknowledged(self, track: Track, append: Append) -> None:
        if track.is_lost:
            return
        track.acked = len(track.sent)
        track.moved()
        self._show(track, append)
        if track.ending is not None:
            self.wake(track)
        elif track.pending:
            self.wake(track, is_urgent=False)

    async def _settled(self, track: Track, written: Written) -> None:
        if written == "behind":
            await self._agree([track])
        elif written == "ok" and track.settled is not None and not track.settled.done():
            track.settled.set_result("ok")
        elif written != "ok":
            metrics.FENCED_APPENDS.inc()
            track.lose(written)

    def _show(self, track: Track, append: Append) -> None:
        for pod in track.readers:
            if pod not in self._muted:
                self._hints.setdefault(pod, []).append(append)
                self._rhythm.ask(rhythm.NOW if track.acked <= _EARLY else self._rhythm.hints_at)

    # -- after a break --------------------------------------------------------------------------------------------

    async def _resync(self) -> None:
        """Ask every log until the broker answers; the tracks' leases may run out meanwhile, and then they are lost.

        A broker that answers but has been full for too long gets no more: the jobs end as failed.
        """
        full_since: float | None = None
        for delay_s in itertools.chain(_RETRY_S, itertools.repeat(_RETRY_S[-1])):
            await asyncio.sleep(delay_s)
            now = time.monotonic()
            try:
                await self._agree(
                    list(self._tracks.values()), is_full=full_since is not None and now - full_since > _FULL_S
                )
                return
            except BrokerFull:
                full_since = full_since or now
            except BrokerDown:
                full_since = None

    async def _agree(self, tracks: Sequence[Track], *, is_full: bool = False) -> None:
        """Make tracks agree with their logs: drop what a log has, send again what it has not, or lose the track.

        A hundred at a time, each in one round trip: hundreds that are asked one by one outlive their leases.
        """
        for some in (tracks[first : first + _AT_ONCE] for first in range(0, len(tracks), _AT_ONCE)):
            lasts = await self._broker.last_ids(self._shard, [track.job_id for track in some])
            for track, last in zip(some, lasts, strict=True):
                if self._is_open(track) and self._is_ours(track, last) and is_full:
                    track.refuse(BrokerFull())
            await self._resend([track for track in some if self._is_open(track)])
            for track in filter(self._is_open, some):
                self.wake(track)

    def _is_open(self, track: Track) -> bool:
        """It was not released, settled or lost meanwhile."""
        return self._tracks.get(track.job_id) is track and not track.is_lost

    def _is_ours(self, track: Track, last: Position | None) -> bool:
        """Take in where a track's log ends; one that is another's by now is lost."""
        if last is None:
            track.lose("gone")
            return False
        attempt, n = keys.position(last)
        if attempt == track.attempt and track.ending is not None and n == len(track.sent) + 1:
            return True  # the settle was done and its answer lost: asking again answers ok
        if attempt != track.attempt or n > len(track.sent):
            metrics.FENCED_APPENDS.inc()
            said = {"event": "fenced", "request_id": track.job_id}
            log.info("job %s: fenced at %s", track.job_id, last, extra=said)
            track.lose("stale")
            return False
        for index in range(track.acked, n):
            self._show(track, self._entry(track, index + 1))
        track.acked = n
        track.moved()
        return True

    async def _resend(self, tracks: Sequence[Track]) -> None:
        """Write what logs lack, every log's in order."""
        missing = [(track, n) for track in tracks for n in range(track.acked + 1, len(track.sent) + 1)]
        for first in range(0, len(missing), _AT_ONCE):
            some = missing[first : first + _AT_ONCE]
            entries = [self._entry(track, n) for track, n in some]
            answers = await self._lane.exchange([], entries, [])
            for (track, n), entry, written in zip(some, entries, answers.appends, strict=True):
                if written != "ok":
                    track.lose(written)
                elif self._is_open(track):
                    track.acked = n
                    track.moved()
                    self._show(track, entry)

    @staticmethod
    def _entry(track: Track, n: int) -> Append:
        usage = messages.encode(track.usage) if n == track.finished_n and track.usage else b""
        return Append(track.job_id, f"{track.attempt}-{n}", track.sent[n - 1], usage)


def _ending(track: Track) -> Ended:
    assert track.ending is not None
    return track.ending


def _encode_end(track: Track) -> bytes:
    return messages.encode(Entry(track.age_ms, [_ending(track)]))
