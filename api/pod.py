"""What a pod has while it runs: the broker, the tail, and a few loops. Nothing of a request outlives it here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from typing import Protocol

from headrace.api.audit import Audit
from headrace.api.gauges import Gauges
from headrace.api.keyring import Keyring
from headrace.api.pace import Pace
from headrace.api.tracing import Tracing
from headrace.broker import figures, metrics, tracing
from headrace.broker.errors import BrokerDown, BrokerFull, Draining, HeadraceError
from headrace.broker.models_file import ModelsFile
from headrace.broker.outage import Outage
from headrace.broker.protocol import Broker
from headrace.broker.reaping import reap_for_ever
from headrace.broker.settings import Settings
from headrace.broker.tail import Tail
from headrace.broker.tasks import cancel_all

log = logging.getLogger(__name__)

_FULL = 0.8
"""Share of the broker's memory from which on nothing new is admitted."""
_SECRET_S = 60.0


class Beating(Protocol):
    """An open stream, as the pod's beat sees it."""

    is_writing: bool

    def beat(self, now: float) -> None:
        """Write a heartbeat if one is due, or end a client that takes nothing; `now` is monotonic seconds."""
        ...


class Pod:
    """See the module. `start` returns also while the broker is down: readiness says so until it is there."""

    def __init__(self, settings: Settings, broker: Broker, url: str = "", models: ModelsFile | None = None) -> None:
        """`models`: where to look whether they have changed; None is for those of `settings` as long as it runs."""
        self.id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.settings = settings
        self.broker = broker
        self.keyring = Keyring(settings, broker.ledger)
        self.pace = Pace(settings.api.resumes_per_minute)
        self.audit = Audit(broker.ledger)
        self.url = url
        self._models = models
        self.beat_s = min(1.0, settings.api.heartbeat_s / 4)
        """How often every open stream is asked whether a heartbeat is due."""
        tracer = tracing.opened(settings.tracing, "headrace-pod", self.id)
        self.tracing = Tracing(settings.tracing, tracer) if tracer is not None else None
        """None if tracing is off."""
        self.tail = Tail(broker, self.id, settings.queue.reader_lease_s)
        self.beats: set[Beating] = set()
        """The streams that are open here."""
        self.trouble: HeadraceError | None = BrokerDown("the broker has not answered yet", retry_after_s=1)
        """Why this pod cannot admit now, if it cannot."""
        self.is_draining = False
        self._tasks: list[asyncio.Task[None]] = []
        self._secret = secrets.token_bytes(32)
        self._secret_until = 0.0
        self._is_open = False
        self._recorder = figures.Recorder()
        self._down_since: float | None = None
        self._outage = Outage(log, "broker_down", "the broker is down")
        self._is_well = asyncio.Event()
        self._gauges = Gauges(settings, broker)

    async def start(self) -> None:
        await self._check_broker()
        await self.tail.start()
        self._tasks = [
            asyncio.create_task(loop(), name=loop.__name__) for loop in (self._watch_broker, self._reap, self._beat)
        ]
        if self._models is not None:
            self._tasks.append(asyncio.create_task(self._models.follow(self._take), name="follow models"))

    async def close(self) -> None:
        await cancel_all(self._tasks)
        await self.tail.close()
        with contextlib.suppress(BrokerDown):
            await self.broker.absent("pods", self.id, "")
        await self.broker.close()
        if self.tracing is not None:
            await self.tracing.tracer.close()

    def _take(self, settings: Settings) -> None:
        """New models; a request that has begun goes on with those that it has seen."""
        self.settings = settings
        self._gauges.follow(settings)

    async def secret(self) -> bytes:
        """What idempotency keys are made job ids with, the same in every pod.

        It is asked for again now and then: that keeps it alive, and puts it back if the broker has lost it.
        """
        if time.monotonic() >= self._secret_until:
            self._secret = await self.broker.secret(self._secret)
            self._secret_until = time.monotonic() + _SECRET_S
        return self._secret

    def drain(self) -> None:
        """Not ready from now on; open streams go on for `drain_s`, and then their clients go on elsewhere."""
        self.is_draining = True
        self.trouble = Draining(retry_after_s=1)

    def require_broker(self) -> None:
        """Raise what keeps this pod from admitting, if anything does."""
        if self.trouble is not None:
            raise self.trouble

    async def observe(self) -> None:
        """Bring the gauges that come from the broker up to date; called when Prometheus asks."""
        if not self._is_well.is_set():
            self._gauges.forget()
            return
        try:
            await self._gauges.refresh()
        except BrokerDown as error:
            self.trouble = error

    async def cancel(self, job_id: str, cause: str) -> str:
        """Cancel a job, and answer what it was; a replica counts those that ran, nobody else those that waited."""
        was = await self.broker.cancel(job_id, cause)
        if was == "waiting":
            metrics.CANCELLATIONS.labels(cause).inc()
        return was

    async def _watch_broker(self) -> None:
        while True:
            await asyncio.sleep(random.uniform(0.8, 1.2))
            await self._check_broker()

    async def _check_broker(self) -> None:
        try:
            if not self._is_open:
                await self.broker.open()
                self._is_open = True
            used = await self.broker.ping()
            await self.keyring.refresh()
            await self.broker.present("pods", self.id, "", self._about())
        except BrokerDown as error:
            self._outage.down(error)
            self.trouble = error
            self._is_well.clear()
            self._lose_patience(error)
        else:
            self._outage.up()
            self._down_since = None
            if not self.is_draining:
                self.trouble = BrokerFull(retry_after_s=5) if used >= _FULL else None
            self._is_well.set()  # a broker that is full answers, and what has run out must end there
            metrics.BROKER_MEMORY.set(used)
        metrics.BROKER_UP.set(self._is_well.is_set())

    def _lose_patience(self, error: BrokerDown) -> None:
        """Streams wait for the broker, but not for ever; new ones are refused from the first moment."""
        now = time.monotonic()
        self._down_since = self._down_since or now
        if now - self._down_since > self.settings.api.broker_patience_s:
            self.tail.fail_all(error)

    def _about(self) -> dict[str, str | int]:
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "url": self.url,
            "streams": len(self.beats),
            **self._recorder.publish(time.monotonic(), figures.of_pod()),
        }

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.beat_s)
            now = time.monotonic()
            for stream in list(self.beats):
                stream.beat(now)

    async def _reap(self) -> None:
        await self._is_well.wait()
        await reap_for_ever(self.broker, range(self.broker.shards), self.settings.queue.lease_s)
