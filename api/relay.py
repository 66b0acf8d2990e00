"""From a log to a client, frame by frame.

No timer or task exists per token: a hint is folded and written where it arrives, as long as the client keeps up, and
the pod's beat pokes the streams that are due for a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.types import Send

from headrace.api.joining import joined
from headrace.api.reply import ClientGone, Reply, Subject, end_of, raise_failure
from headrace.api.requests import Cut, Skip
from headrace.api.wire.format import can_join
from headrace.broker import keys, metrics
from headrace.broker.errors import BadPosition, BrokerDown, HeadraceError, LogLost
from headrace.broker.messages import Claimed, Queued, ReadEntry, Started
from headrace.broker.tail import Reader

log = logging.getLogger(__name__)

_PROBE_S = 0.1


class StreamReply(Reply):
    """A response frame by frame; `cut` is what the client has already."""

    def __init__(self, subject: Subject, reader: Reader, cut: Cut | Skip | None) -> None:
        super().__init__(subject, reader)
        self.wrote_at = time.monotonic()
        self.is_writing = False
        self._fold = subject.form.fold(subject.job_id, subject.view)
        self._frame, self._job_id = subject.form.frame, subject.job_id
        self._cut = cut
        self._is_past_cut = cut is None
        self._left = cut.frames if isinstance(cut, Skip) else 0
        self._has_headers = False
        self._are_headers_due = False
        self._beat_at = 0.0
        self._beat_every_s = subject.pod.settings.api.heartbeat_s - subject.pod.beat_s
        self._writes = 0
        self._is_slow = False
        """The client had not taken what was written before when the last frames were."""

    async def respond(self, send: Send) -> None:
        wait_s = self.subject.pod.settings.api.headers_after_ms / 1000
        timer = asyncio.get_running_loop().call_later(wait_s, self._call_headers)
        beats = self.subject.pod.beats
        beats.add(self)
        try:
            await self._stream(send)
        except ClientGone:
            raise
        except HeadraceError as error:
            await self._fail(send, error)
        finally:
            timer.cancel()
            beats.remove(self)

    def beat(self, now: float) -> None:
        """Called by the pod every `beat_s`: it is time for a heartbeat if the next call would be too late for it.

        A client that takes nothing for too long is cut off; the connection may hold back what was written for ever.
        """
        if not self.is_writing:
            if now >= self._beat_at:
                self.reader.poke()
        elif now - self.wrote_at > self.subject.pod.settings.api.slow_client_timeout_s:
            said = {"event": "slow_client", "request_id": self.subject.job_id}
            log.info("job %s: its client took nothing for too long", self.subject.job_id, extra=said)
            self.connection.abort()

    def _call_headers(self) -> None:
        """Headers have waited long enough; from now on they need nothing of the worker."""
        self._are_headers_due = True
        self.reader.poke()

    async def give_up(self, send: Send) -> None:
        if self._has_headers:
            self.connection.abort()
        else:
            await super().give_up(send)

    def on_half_closed(self) -> None:
        """Two writes tell whether it still reads, since the second one fails if not."""
        self._write_soon()
        asyncio.get_running_loop().call_later(_PROBE_S, self._write_soon)

    def _write_soon(self) -> None:
        self._beat_at = 0.0
        self._call_headers()

    async def _stream(self, send: Send) -> None:
        held: list[ReadEntry] = []
        while True:
            entries = await self.reader.read()
            came_at = time.monotonic()
            if self.subject.coalesce_s and self._has_headers and entries and not entries[-1].is_end:
                await asyncio.sleep(self.subject.coalesce_s)
                entries += self.reader.take()
            for entry in entries:
                self.subject.stages.note(entry)
            held += entries
            if not entries:
                held = await self._write_heartbeat(send, held)
            elif self._has_headers or any(map(_is_begun, entries)):
                if await self._write_entries(send, held, came_at):
                    return
                held = []

    async def _write_entries(self, send: Send, entries: list[ReadEntry], came_at: float) -> bool:
        """Fold entries and write their frames at once; True after the end."""
        ended = end_of(entries[-1])
        if ended and not self._has_headers and not any(map(_is_started, entries)):
            raise_failure(ended)
        frames = self._take_in(entries)
        if ended:
            if not self._is_past_cut:
                raise BadPosition("the position is later than the stream's end")
            frames.append(self.subject.form.terminator)
            self.outcome = "ok" if ended.status == "done" else (ended.error.code if ended.error else ended.status)
        if self._is_past_cut and (frames or not self._has_headers):
            await self._write(send, b"".join(frames), is_last=ended is not None)
            self._observe_lag(entries[-1])
            self._observe_first(came_at)
            push = self._push_first if self.subject.stages.first_ms is None else self._push
            self.reader.sink = None if self.subject.coalesce_s else push
        return ended is not None

    def _take_in(self, entries: list[ReadEntry]) -> list[bytes]:
        frames: list[bytes] = []
        if self._is_past_cut and (self._is_slow or self.subject.coalesce_s) and can_join(self.subject.form):
            entries = joined(entries)
        for entry in entries:
            frames += self._frames(entry)
        return frames

    def _push_first(self, entry: ReadEntry) -> bool:
        """`_push` until the first content has come, whose time is wanted."""
        came_at = time.monotonic()
        is_taken = self._push(entry)
        if is_taken:
            self.subject.stages.note(entry)
            self._observe_first(came_at)
            if self.subject.stages.first_ms is not None:
                self.reader.sink = self._push
        return is_taken

    def _observe_first(self, came_at: float) -> None:
        """What came at `came_at` has been written: the first content token, it may be."""
        first = self.subject.first_token
        if first is not None and self.subject.stages.first_ms is not None:
            first.write(came_at)
            first.observe(self.subject.stages, self.subject.view.model)
            self.subject.first_token = None

    def _push(self, entry: ReadEntry) -> bool:
        """The hot path, of a client that keeps up: one entry from the hint to the socket, without a task.

        False leaves the entry to `_stream`, as the reader leaves the end: it must wait for the client.
        """
        if not self.connection.can_write_chunk():
            return False
        if frames := self._frames(entry):
            self.connection.write_chunk(frames[0] if len(frames) == 1 else b"".join(frames))
            self._beat_at = time.monotonic() + self._beat_every_s
            self._observe_lag(entry)
        else:
            self.subject.stages.note(entry)  # another attempt, it may be
        return True

    def _frames(self, entry: ReadEntry) -> list[bytes]:
        """The frames of an entry that the client has not, with their positions."""
        payloads = self._fold.feed(entry)
        frame, position = self._frame, f"{self._job_id}.{entry.id}"
        if self._is_past_cut and len(payloads) == 1:
            return [frame(position, payloads[0])]
        last = len(payloads) - 1
        return [
            frame(position if index == last else f"{position}.{index + 1}", payloads[index])
            for index in range(self._first_new_frame(entry, len(payloads)), len(payloads))
        ]

    def _observe_lag(self, entry: ReadEntry) -> None:
        """Of one write in 16: it is dearer than the write."""
        if not self._writes & 15:
            metrics.RELAY_LAG.observe(max(0.0, time.time() - (self.subject.stages.enqueued_ms + entry.at_ms) / 1000))
        self._writes += 1

    def _first_new_frame(self, entry: ReadEntry, count: int) -> int:
        """How many of an entry's `count` frames the client has; raises LogLost if its position is none of this log."""
        if self._is_past_cut or self._cut is None:
            return 0
        metrics.REPLAYED_EVENTS.inc()
        if isinstance(self._cut, Skip):
            seen = min(self._left, count)
            self._left -= seen
            self._is_past_cut = self._left == 0
            return seen
        at = keys.position(entry.id)
        if at < self._cut.entry:
            return count
        frame = self._cut.frame
        if at > self._cut.entry or (frame is not None and frame >= count):
            raise LogLost("this position is not in the log")
        self._is_past_cut = True
        return count if frame is None else frame

    async def _write_heartbeat(self, send: Send, held: list[ReadEntry]) -> list[ReadEntry]:
        """A heartbeat if one is due; answers the entries that are still held.

        It brings the headers with it if they have waited long enough, and what was held with them: a format whose first
        frame is an early one, so that its client knows where to come back to.
        """
        is_due = time.monotonic() >= self._beat_at if self._has_headers else self._are_headers_due
        if not is_due:
            return held
        frames = self._take_in(held)
        note = self.subject.form.heartbeat(await self._waiting_note(), self.subject.view)
        await self._write(send, b"".join((*frames, note)))
        return []

    async def _waiting_note(self) -> str:
        if self.subject.stages.attempts:
            return "working"
        try:
            status = await self.subject.pod.broker.status(self.subject.job_id)
        except BrokerDown:
            return "the broker is down"
        return "working" if status is None or status.ahead is None else f"queued, {status.ahead} before this request"

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        self.is_writing, self.wrote_at = True, time.monotonic()
        self._is_slow = self._has_headers and not self.connection.can_write_chunk()
        if not self._has_headers:
            self._has_headers = True
            headers = {
                "content-type": self.subject.form.media_type,
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
            }
            await self.send_start(send, 200, headers)
        await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        self.is_writing = False
        self._beat_at = time.monotonic() + self._beat_every_s

    async def _fail(self, send: Send, error: HeadraceError) -> None:
        self.outcome, error.job_id = error.code, self.subject.job_id
        if not self._has_headers:
            await self.refuse(send, error)
            return
        form = self.subject.form
        frame = form.frame("", form.error_frame(error))
        await self._write(send, frame + form.terminator, is_last=True)


def _is_started(entry: ReadEntry) -> bool:
    """Has the engine accepted the prompt? Whatever comes then is told in the stream, whenever it is read."""
    return any(isinstance(event, Started) for event in entry.events)


def _is_begun(entry: ReadEntry) -> bool:
    """Does this entry say more than that the job waits or was taken?"""
    return any(not isinstance(event, Queued | Claimed) for event in entry.events)
