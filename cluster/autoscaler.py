"""One model's autoscaler, inside Ray Serve's controller: a thread reads the broker, and `decide` only reads its cache.

`decide` is called ten times a second in the controller's loop: it never waits and never raises. What it decides goes
into the broker's log by way of the thread, which also says once a second that capacity is wanted as long as this lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.broker.errors import BrokerDown
from headrace.broker.messages import ScaleDecision
from headrace.broker.models import Model, ModelAutoscaling
from headrace.broker.outage import Outage
from headrace.broker.protocol import Broker
from headrace.broker.settings import Settings
from headrace.cluster import law
from headrace.cluster.budget import Want, split
from headrace.cluster.law import Decision, Signals, State
from headrace.cluster.signals import Totals, signals_of, together
from headrace.cluster.watch import Watch

log = logging.getLogger(__name__)

_UNWRITTEN = 100
_END_S = 5.0


class Reading(Struct, frozen=True):
    """What the thread has read last, of every autoscaled model."""

    at_s: float
    models: dict[str, Signals]


class Autoscaler:
    """See the module. `make_broker` is called in the thread; `start` and `stop` may be called from anywhere, once.

    `watches`: nobody else tells the broker what has become of the model on the cluster.
    """

    def __init__(
        self, settings: Settings, model: str, make_broker: Callable[[], Broker], *, watches: bool = False
    ) -> None:
        self.model = model
        self._settings = settings
        self._make_broker = make_broker
        self._watches = watches
        self._models = [each for each in settings.models if each.autoscaling is not None]
        self._states: dict[str, State] = {}
        self._targets: dict[str, int] = {}
        self._reading: Reading | None = None
        self._decided_at_s = 0.0
        self._said = (0, 0)
        self._unwritten: deque[ScaleDecision] = deque(maxlen=_UNWRITTEN)
        self._totals = {each.name: Totals() for each in self._models}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read_always, name=f"autoscaler {model}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; the thread ends within a period."""
        self._stopping.set()

    # -- in the controller's loop ---------------------------------------------------------------------------------

    def decide(self, current: int, now_s: float | None = None) -> int:
        """How many replicas there should be, while `current` are wanted; a new decision once a period."""
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._decided_at_s < self._settings.autoscaler.period_s:
            return self._answer(current)
        self._decided_at_s = now_s
        try:
            self._decide_all(current, now_s)
        except Exception:  # the edge: an error here would stop the controller from doing its work
            log.exception("no decision for %s", self.model, extra={"event": "decide_failed"})
            self._targets[self.model] = current
        return self._answer(current)

    def _answer(self, current: int) -> int:
        return current if self._settings.autoscaler.advisory else self._targets.get(self.model, current)

    def _decide_all(self, current: int, now_s: float) -> None:
        """Every policy computes all models' numbers and the same split; each acts on its own."""
        decisions = {each.name: self._decide(each, current, now_s) for each in self._models}
        wants = [
            Want(each.name, decisions[each.name].target, chosen.min_replicas, each.gpus, chosen.priority)
            for each in self._models
            if (chosen := each.autoscaling) is not None
        ]
        given = split(wants, self._settings.autoscaler.gpus)
        for name, decision in decisions.items():
            self._states[name] = replace(decision.state, target=given[name])
            self._targets[name] = given[name]
        own = decisions[self.model]
        reason = own.reason if given[self.model] == own.target else "budget"
        self._note(current, given[self.model], reason, own)
        if self._settings.autoscaler.advisory:
            self._states[self.model] = replace(self._states[self.model], target=current)

    def _decide(self, model: Model, current: int, now_s: float) -> Decision:
        reading, is_own = self._reading, model.name == self.model
        signals = reading.models.get(model.name) if reading else None
        state = self._states.get(model.name)
        if state is None:
            there = signals.ready + signals.starting if signals else model.replicas
            state = State(target=current if is_own else there)
        if signals is not None and reading is not None:
            starting = max(0, current - signals.ready) if is_own else signals.starting
            signals = replace(signals, age_s=max(0.0, now_s - reading.at_s), starting=starting)
        assert model.autoscaling is not None
        return law.desired(signals, state, config_of(model, model.autoscaling, self._settings))

    def _note(self, before: int, target: int, reason: str, decision: Decision) -> None:
        seen = decision.state.seen or Signals(at_s=0.0)
        direction: Literal["up", "down", "hold"] = "up" if target > before else "down" if target < before else "hold"
        if direction != "hold" and (before, target) != self._said:  # advice stays the same for long
            self._said = before, target
            log.info("%s: %d to %d: %s", self.model, before, target, reason, extra={"event": f"scale_{direction}"})
        self._unwritten.append(
            ScaleDecision(
                time.time_ns() // 1_000_000,
                before,
                target,
                direction,
                reason,
                decision.wanted,
                seen.waiting,
                seen.waiting_tokens,
                round(1000 * seen.oldest_s),
                seen.running,
                seen.ready,
                seen.starting,
                self._settings.autoscaler.advisory,
            )
        )

    # -- in the thread --------------------------------------------------------------------------------------------

    def _read_always(self) -> None:
        with contextlib.suppress(Exception):  # a thread's end must not be a traceback in the controller
            asyncio.run(self._loop())

    async def _loop(self) -> None:
        broker, outage = self._make_broker(), Outage(log, "signals_failed", "the signals cannot be read")
        watch = Watch(broker, self._settings.ray.placement_s) if self._watches else None
        away = Outage(log, "watch_failed", "the cluster cannot be asked what has become of its models")
        id = f"autoscaler-{socket.gethostname()}-{os.getpid()}-{self.model}"
        try:
            while not self._stopping.is_set():
                try:
                    if watch is not None:
                        await self._look(watch, away)
                    await self._once(broker, id)
                    outage.up()
                except BrokerDown as error:
                    outage.down(error)
                await asyncio.sleep(self._settings.autoscaler.period_s / 2)
        finally:
            with contextlib.suppress(BrokerDown, TimeoutError):
                async with asyncio.timeout(_END_S):
                    await broker.absent("cluster", id, self.model)
            await broker.close()

    async def _look(self, watch: Watch, away: Outage) -> None:
        try:
            await watch.once([self._settings.model(self.model)])
        except Exception as error:  # noqa: BLE001  # the edge: whatever Ray has, the signals are read all the same
            away.down(error)
        else:
            away.up()

    async def _once(self, broker: Broker, id: str) -> None:
        at_s = time.monotonic()
        replicas = await broker.listing("replicas")
        stats = {each.name: together([await broker.stats(name) for name in each.names]) for each in self._models}
        for name in self._settings.model(self.model).names:
            if stats[self.model].unplaced:  # what comes is refused with that, in place of waiting for nothing
                await broker.absent("cluster", id, name)
            else:
                await broker.present("cluster", id, name, {})
        self._reading = Reading(
            at_s,
            {name: signals_of(name, at_s, each, replicas, self._totals[name]) for name, each in stats.items()},
        )
        while self._unwritten:
            await broker.note_decision(self.model, self._unwritten.popleft())


def config_of(model: Model, chosen: ModelAutoscaling, settings: Settings) -> law.Config:
    """The law's configuration of a model."""
    return law.Config(
        min_replicas=chosen.min_replicas,
        max_replicas=chosen.max_replicas,
        attainment=chosen.attainment,
        ttft_slo_s=chosen.ttft_slo_s,
        ttft_slo_prefills=chosen.ttft_slo_prefills,
        tpot_slo_s=chosen.tpot_slo_s,
        prefill_tokens_per_s=chosen.prefill_tokens_per_s,
        decode_tokens_per_s=chosen.decode_tokens_per_s or model.slots / chosen.tpot_slo_s,
        slots=model.slots,
        kv_tokens=chosen.kv_tokens,
        start_up_s=chosen.start_up_s,
        hold_s=chosen.hold_s,
        idle_s=chosen.idle_s,
        stale_s=settings.autoscaler.stale_s,
    )
