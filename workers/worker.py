"""A replica's loop: warm up, then claim, run, settle, with a tick ten times a second, until it is told to drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from headrace.broker import figures, metrics, tracing
from headrace.broker.errors import BrokerDown, EngineDied, EngineFailed
from headrace.broker.models import Model, service_levels
from headrace.broker.outage import Outage
from headrace.broker.protocol import Asking, Broker, Claim, Claims
from headrace.broker.reaping import reap_for_ever
from headrace.broker.settings import Settings
from headrace.broker.tasks import cancel_all
from headrace.broker.writer import LogWriter
from headrace.workers import generations
from headrace.workers.engines.protocol import Engine
from headrace.workers.leases import Leases
from headrace.workers.measures import Measures
from headrace.workers.prefixes import Served
from headrace.workers.queues import Queues
from headrace.workers.rates import totals
from headrace.workers.run import JobRun
from headrace.workers.seats import NoSlot, Seats
from headrace.workers.startup import Startup
from headrace.workers.tracing import Traces

log = logging.getLogger(__name__)

_PRESENCE_S = 1.0
_CLAIM_AT_ONCE = 64  # so that one script does not hold the server for long
_QUEUED = "0-1"
"""The entry that the first claim of a job follows."""
_CLOSE_S = 5.0
_IDLE_CLAIM_S = 1.0
"""An idle replica asks again this often, in case its wake-up was lost."""
_ANSWER_TOKENS = 256
"""How long an answer without a limit is taken to be."""


def replica_id() -> str:
    """New at each start, so that nothing of an earlier process can be taken for this one's."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


class Worker:
    """One replica of one model. `start`, then `run` until it is cancelled or drained; `drain` may come at any time."""

    def __init__(  # what it is made of, and where it is
        self,
        settings: Settings,
        model: Model,
        broker: Broker,
        engine: Engine,
        metrics_at: str = "",
        node: str = "",
    ) -> None:
        """`metrics_at` is where Prometheus finds this process's metrics, as `host:port`; `node` is where a cluster has
        placed it."""
        self.id = replica_id()
        self._node = node
        self._settings = settings
        self._model = model
        self._queues = Queues(model)
        self._broker = broker
        self._engine = engine
        self._metrics_at = metrics_at
        self._measures = Measures(model, engine)
        self._levels = service_levels(model)
        self._writers = [LogWriter(broker, shard, settings.worker.pace_s) for shard in range(broker.shards)]
        tracer = tracing.opened(settings.tracing, "headrace-worker", self.id)
        self._traces = Traces(tracer, self.id, str(model.__struct_config__.tag)) if tracer is not None else None
        """None if tracing is off."""
        self._generations = generations.opened(settings.generation_log, self.id)
        self._runs: dict[str, JobRun] = {}
        self._freed = asyncio.Event()
        self._seats = Seats(model.slots, self._freed.set)
        self._served = Served(0)
        self._idle = asyncio.Event()
        self._work = asyncio.Event()
        self._shards_with_work: set[int] = set()
        self._is_draining = False
        self._is_claiming = False
        self._state = "starting"
        self._startup = Startup(model.name, lambda *_: None)
        self._recorder = figures.Recorder()
        self._tasks: list[asyncio.Task[None]] = []
        self._job_tasks: set[asyncio.Task[None]] = set()
        self._failure: EngineFailed | None = None
        self._has_died = False
        """The engine died under its jobs, as if the replica had: one of them may be why."""

    @property
    def running(self) -> int:
        return len(self._runs)

    async def start(self, progress: Callable[[str, float], None] = lambda *_: None) -> None:
        """Load and warm up the engine; the registry shows the replica as starting meanwhile."""
        self._startup = Startup(self._model.name, progress)
        self._spawn(self._presence_loop, "presence")
        try:
            await self._engine.load(self._startup.show)
        except BaseException:
            await self._stop()
            raise
        took_s, self._state = self._startup.end(), "ready"
        with contextlib.suppress(BrokerDown):
            await self._be_present()
        log.info(
            "replica %s of %s is ready after %.1f s",
            self.id,
            self._model.name,
            took_s,
            extra={"event": "replica_ready"},
        )

    async def run(self) -> None:
        """Serve until `drain` is done; raises what broke the loop, or EngineFailed once an engine that hangs has no
        jobs any more."""
        wakes = self._broker.listen_wakes(self.id, self._on_wake)
        for writer in self._writers:
            self._spawn(writer.run, "writer")
        for shard in range(self._broker.shards):
            leases = Leases(self._broker, shard, self.id, self._settings, self._runs, lambda: self._is_claiming)
            self._spawn(leases.run, "leases")
        shards, lease_s = range(self._broker.shards), self._settings.queue.lease_s
        self._spawn(partial(reap_for_ever, self._broker, shards, lease_s), "reap")
        self._spawn(self._health_loop, "health")
        try:
            await self._claim_loop()
            await self._wait_idle()
        finally:
            await wakes.close()
            await self._stop()
        if self._failure is not None:
            raise self._failure

    def check_health(self) -> None:
        """Raise EngineFailed if a loop of this replica has broken, or the engine makes no steps."""
        if self._failure is not None:
            raise self._failure
        limit = self._settings.worker.step_timeout_s
        if any(run.is_stuck(limit) for run in self._runs.values()):
            raise EngineFailed(f"the engine has made no step for {limit:g} s")

    async def drain(self) -> None:
        """Claim nothing more; finish what can be finished in `drain_s`, hand the rest back, and end `run`."""
        if self._is_draining:
            return
        await self._claim_no_more()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._wait_idle(), self._settings.worker.drain_s)
        await self.release_all()

    async def _claim_no_more(self) -> None:
        self._is_draining, self._state = True, "draining"
        self._work.set()
        self._freed.set()

    async def _health_loop(self) -> None:
        """A replica that is not well gives everything away at once and ends: whoever started it starts another."""
        period_s = min(1.0, self._settings.worker.step_timeout_s / 4)
        while True:
            await asyncio.sleep(period_s)
            try:
                self.check_health()
                await self._engine.check_health()
            except EngineFailed as error:
                log.error("replica %s gives its jobs back: %s", self.id, error, extra={"event": "replica_unwell"})
                self._failure = error
                self._has_died = isinstance(error, EngineDied)
                await self._claim_no_more()
                await self.release_all()
                return

    async def release_all(self) -> None:
        """Hand every running job back, at once; what the broker does not take now, the lease gives back."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with asyncio.timeout(self._settings.queue.lease_s):
                await asyncio.gather(*(self._give_back(run) for run in list(self._runs.values())))

    # -- claim, run -----------------------------------------------------------------------------------------------

    def _on_wake(self, shard: int) -> None:
        self._shards_with_work.add(shard)
        self._work.set()

    async def _claim_loop(self) -> None:
        outage = Outage(log, "claim_failed", "no jobs can be claimed")
        about = self._engine.capabilities
        self._served = Served(about.kv_tokens or about.slots * about.context_tokens, self._broker.shards)
        while not self._is_draining:
            await self._room()
            if self._is_draining:
                return
            try:
                is_idle, again_s = await self._claim_some()
                outage.up()
            except BrokerDown as error:
                outage.down(error)
                await asyncio.sleep(0.5)
                continue
            if is_idle:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._work.wait(), again_s)

    def _wanted(self) -> int:
        """How many jobs more would keep the engine's batch full."""
        slots, pace = self._model.slots, self._seats.pace
        if pace.enough_tokens(self._engine.capabilities.step_tokens) == 0:
            return 0
        ahead = pace.ahead(slots)
        # a job that only waits to be settled has no slot, and there may be as many
        return min(slots + ahead - self._seats.held, 2 * slots + ahead - self.running)

    async def _room(self) -> None:
        """Wait until another job would be of use."""
        while not self._is_draining and self._wanted() <= 0:
            self._freed.clear()
            await self._freed.wait()

    async def _claim_some(self) -> tuple[bool, float]:
        """Ask the shards in turn, first the one that woke us, until there are enough jobs or none has work.

        Answers whether all of them had too few and have entered us as idle, so that they wake us; else there may be
        more right now. And how soon there may be more although nobody wakes us, in seconds.
        """
        self._work.clear()
        first = self._shards_with_work.pop() if self._shards_with_work else random.randrange(self._broker.shards)
        self._shards_with_work.clear()
        is_idle, again_s = True, _IDLE_CLAIM_S
        for offset in range(self._broker.shards):
            shard = (first + offset) % self._broker.shards
            wanted = self._wanted()
            if wanted <= 0:
                return False, again_s
            claims = await self._claim(shard, min(wanted, _CLAIM_AT_ONCE))
            is_idle = is_idle and claims.is_idle
            if claims.again_ms is not None:
                again_s = min(again_s, claims.again_ms / 1000)
        return is_idle, again_s

    async def _claim(self, shard: int, count: int) -> Claims:
        pace, step_tokens = self._seats.pace, self._engine.capabilities.step_tokens
        asking = Asking(pace.enough_tokens(step_tokens), pace.bytes_per_s, self._served.dropped(shard))
        asked_at = asyncio.get_running_loop().time()
        self._is_claiming = True
        try:
            claims = await self._broker.claim(shard, self.id, self._queues.order(), count, asking)
            runs = [self._begin(shard, claim, asked_at) for claim in claims]
        finally:
            self._is_claiming = False
        if self._is_draining:  # it began while the claim was under way
            await asyncio.gather(*map(self._give_back, runs))
        return claims

    def _begin(self, shard: int, claim: Claim, asked_at: float) -> JobRun:
        if claim.after == _QUEUED:
            metrics.QUEUE_WAIT.labels(claim.job.model).observe(claim.waited_ms / 1000)
        self._queues.took(claim.job.model)
        answer_tokens = min(claim.job.max_tokens or _ANSWER_TOKENS, self._engine.capabilities.context_tokens)
        self._served.serve(shard, claim.prefix, claim.job.id, answer_tokens)
        trace = self._traces.attempt(claim) if self._traces is not None else None
        run = JobRun(claim, self._engine, self._writers[shard], self._seats.seat(claim, asked_at), trace, self._levels)
        self._runs[claim.job.id] = run
        self._job_tasks.add(task := asyncio.create_task(self._run_job(run), name=f"job {claim.job.id}"))
        task.add_done_callback(self._job_tasks.discard)
        return run

    async def _run_job(self, run: JobRun) -> None:
        try:
            await run.start(self._broker)
        except BrokerDown:
            said = {"event": "take_up_failed", "request_id": run.job.id}
            log.warning("job %s: its log cannot be read now", run.job.id, extra=said)
            await self._give_back(run)
        except NoSlot:
            log.info(
                "job %s: no slot came free, it goes back",
                run.job.id,
                extra={"event": "no_slot", "request_id": run.job.id},
            )
            await self._give_back(run)
        except Exception as error:  # noqa: BLE001  # the edge of the job: it must end, whatever happened
            run.fail(error)
        await run.done.wait()
        if self._generations is not None and run.is_done:
            self._generations.ended(self._broker, run.job)
        await self._forget(run)

    async def _forget(self, run: JobRun) -> None:
        if self._runs.get(run.job.id) is run:
            del self._runs[run.job.id]
        self._freed.set()
        if not self._runs:
            self._idle.set()

    async def _give_back(self, run: JobRun) -> None:
        """A job on which the engine hung or died goes with a death: it must not take down one replica after another."""
        try:
            with contextlib.suppress(BrokerDown):
                is_death = self._has_died or run.is_stuck(self._settings.worker.step_timeout_s)
                await run.release(self._broker, self.id, is_death=is_death)
        finally:
            run.track.lose("stale")
            await self._forget(run)  # its task may hang in the engine for ever

    async def _wait_idle(self) -> None:
        while self._runs:
            self._idle.clear()
            await self._idle.wait()

    # -- the other loops ------------------------------------------------------------------------------------------

    async def _presence_loop(self) -> None:
        while True:
            with contextlib.suppress(BrokerDown):
                await self._be_present()
            await asyncio.sleep(min(_PRESENCE_S, self._settings.queue.lease_s / 3))

    async def _be_present(self) -> None:
        about: dict[str, str | int] = {
            "model": self._model.name,
            "state": self._state,
            "progress": self._startup.text,
            "slots": self._model.slots,
            "running": self.running,
            "host": socket.gethostname(),
            "node": self._node,
            "pid": os.getpid(),
            "metrics": self._metrics_at,
            **self._measures.take(self._runs.values()),
            **self._engine.capabilities.about(),
            **totals(self._queues.names, self._levels.ttft_s),
            **self._recorder.publish(time.monotonic(), figures.of_replica(self._model.name)),
        }
        if adapters := self._queues.names[1:]:
            about["adapters"] = msgspec.json.encode(adapters).decode()
        for name in adapters:
            await self._broker.present("cluster", self.id, name, {})
        await self._broker.present("replicas", self.id, self._model.name, about)

    def _spawn(self, loop: Callable[[], Awaitable[None]], name: str) -> None:
        async def guarded() -> None:
            try:
                await loop()
            except Exception as error:  # the edge of a loop: health says it, and the replica gives up
                log.exception("the %s loop broke", name, extra={"event": "loop_broke"})
                self._failure = EngineFailed(f"the {name} loop of this replica has broken")
                self._failure.__cause__ = error

        self._tasks.append(asyncio.create_task(guarded(), name=name))

    async def _stop(self) -> None:
        with contextlib.suppress(BrokerDown):
            await self.release_all()
        await cancel_all([*self._tasks, *self._job_tasks])
        with contextlib.suppress(BrokerDown):
            for name in self._queues.names[1:]:
                await self._broker.absent("cluster", self.id, name)
            await self._broker.absent("replicas", self.id, self._model.name)
        if self._generations is not None:
            await self._generations.close()
        if self._traces is not None:
            await self._traces.tracer.close()
        # an engine that hangs may never close; its process ends without
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S if self._failure else None):
                await self._engine.close()
