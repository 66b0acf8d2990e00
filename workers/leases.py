"""A replica's leases on one shard: renewed, listened to, and compared with what it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from headrace.broker import keys
from headrace.broker.errors import BrokerDown
from headrace.broker.protocol import Broker, News
from headrace.broker.settings import Settings
from headrace.workers.run import JobRun

log = logging.getLogger(__name__)


class Leases:
    """`run` ticks until it is cancelled. `runs` is the worker's own mapping of all its jobs, by id.

    `is_claiming` says whether a claim is under way, whose reply may bring jobs that look unknown until then.
    """

    def __init__(
        self,
        broker: Broker,
        shard: int,
        replica: str,
        settings: Settings,
        runs: Mapping[str, JobRun],
        is_claiming: Callable[[], bool],
    ) -> None:
        self._broker = broker
        self._shard = shard
        self._replica = replica
        self._tick_s = settings.worker.tick_s
        self._renew_s = settings.queue.lease_s / 3
        self._runs = runs
        self._is_claiming = is_claiming
        self._seen = 0
        self._renewed_at = 0.0
        self._unknown: set[str] = set()
        self._unheld: set[str] = set()
        self._releases: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            try:
                # a connection that hangs must be given up long before the leases run out
                async with asyncio.timeout(self._renew_s):
                    await self._tick()
            except (BrokerDown, TimeoutError):
                log.debug("tick failed", extra={"event": "tick_failed"})
            await asyncio.sleep(self._tick_s)

    async def _tick(self) -> None:
        """Hear the news; each time that leases are renewed, compare them with what runs here."""
        renew = time.monotonic() - self._renewed_at >= self._renew_s
        tick = await self._broker.tick(self._shard, self._replica, self._seen, renew=renew, list_held=renew)
        self._seen = tick.serial
        for news in tick.news:
            self._hear(news)
        if renew:
            self._renewed_at = time.monotonic()
            self._compare(set(tick.jobs))

    def _hear(self, news: News) -> None:
        run = self._runs.get(news.job_id)
        if run is None:
            return
        if news.attempt != run.claim.attempt:
            run.track.lose("stale")
            return
        run.read_by(news.readers)
        if news.cancel:
            run.cancel(news.cancel)

    def _compare(self, held: set[str]) -> None:
        """Hand back leases whose claim reply was lost, and stop what is not leased to us any more.

        Jobs come and go between question and answer: only what differs twice in a row, with no claim under way, counts.
        """
        if self._is_claiming():
            return
        mine = {job_id for job_id in self._runs if keys.shard_of(job_id) == self._shard}
        unknown = held - mine
        unheld = {job_id for job_id in mine - held if not self._runs[job_id].is_ending}
        for job_id in unknown & self._unknown:
            self._releases.add(task := asyncio.create_task(self._release(job_id), name=f"release {job_id}"))
            task.add_done_callback(self._releases.discard)
        for job_id in unheld & self._unheld:
            self._runs[job_id].track.lose("stale")
        self._unknown, self._unheld = unknown, unheld

    async def _release(self, job_id: str) -> None:
        try:
            await self._broker.release(self._replica, job_id, None, None)
        except BrokerDown:
            return
        said = {"event": "claim_mended", "request_id": job_id}
        log.warning("job %s: its claim's reply was lost, it is handed back", job_id, extra=said)
