"""Replicas in discrete events: one queue in order of arrival, and replicas that take from it.

The model of a replica, which is explicit and simple:

* It takes the next request when it prefills nothing, has a free slot, and the request's tokens (prompt and answer) fit
  what is left of its KV room. One prompt at a time, as chunked prefill does in order.
* While something decodes, a prompt gets `prefill_share` of the time and decoding the rest; alone each has all of it.
* A decode step of b sequences takes `step_s * (idle_step_share + (1 - idle_step_share) * b / slots)`. All sequences of
  a replica get a token each step, so a sequence ends when the replica's count of steps has grown by its tokens: the
  replica keeps that count as a real number and the ends in a heap, which makes an event cost O(log slots).
* The first token is there at the end of the prefill.

With `is_parallel` prefills do not wait for each other and nothing slows anything, as in the scripted engine.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from headrace.cluster.law import Signals
from headrace.cluster.simulation.trace import Trace
from headrace.cluster.simulation.world import NEVER, Policy, Replica, ReplicaModel, Run, World

__all__ = ["Fleet", "Policy", "ReplicaModel", "Run", "World"]

_DONE = 1e-7


class Fleet:
    """One simulation; `run` may be called once."""

    def __init__(self, trace: Trace, model: ReplicaModel, world: World, policy: Policy, initial: int) -> None:
        self._trace, self._model, self._world, self._policy = trace, model, world, policy
        self._random = np.random.default_rng(world.seed)
        self._arrivals: list[float] = trace.arrival_s.tolist()
        self._inputs: list[int] = trace.input_tokens.tolist()
        self._outputs: list[int] = trace.output_tokens.tolist()
        size = len(trace)
        self._made = [0] * size
        self._first = [NEVER] * size
        self._last = [NEVER] * size
        self._slo: list[float] = self._slos().tolist()
        self._queue: deque[int] = deque()
        self._able: deque[Replica] = deque()
        self._replicas: list[Replica] = []
        self._gone: list[Replica] = []
        self._events: list[tuple[float, int, Replica | None, int, int]] = []
        self._order = 0
        self._now = 0.0
        self._target = initial
        self._targets = [(0.0, initial)]
        self._waiting_tokens = self._arrived_jobs = self._arrived_tokens = 0
        self._thrown_away = self._finished = 0
        self._firsts = self._firsts_met = 0
        self._recent: deque[tuple[float, float]] = deque()
        self._prefill_s = self._prefilled_tokens = 0.0
        self._decoded_tokens = self._decode_s = 0.0
        for _ in range(initial):
            self._become_ready(self._order_replica())

    def _slos(self) -> NDArray[np.float64]:
        world = self._world
        prefill_s = self._trace.input_tokens / self._model.prefill_tokens_per_s
        return world.ttft_slo_s + world.ttft_slo_prefills * prefill_s

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> Run:
        """Until every request has ended, or for twenty minutes after the last arrival."""
        arrivals, events, size, next_job = self._arrivals, self._events, len(self._arrivals), 0
        last = arrivals[-1] + 1200.0
        self._push(self._policy.period_s, None, 0, _TICK)
        while self._finished < size:
            if next_job < size and arrivals[next_job] <= events[0][0]:
                self._now = arrivals[next_job]
                self._arrive(next_job)
                next_job += 1
                continue
            now, _, replica, version, kind = heapq.heappop(events)
            if now > last:
                break
            self._now = now
            if replica is None:
                self._tick() if kind == _TICK else self._dispatch()
            elif kind == _STEP:
                if version == replica.version:
                    self._step(replica)
            else:
                self._change(replica, kind)
        return self._result()

    def _push(self, at: float, replica: Replica | None, version: int, kind: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, replica, version, kind))

    def _arrive(self, job: int) -> None:
        tokens = self._inputs[job]
        self._arrived_jobs += 1
        self._arrived_tokens += tokens
        self._waiting_tokens += tokens
        self._queue.append(job)
        if self._able:
            self._dispatch()

    def _dispatch(self) -> None:
        """Give the first of the queue to the replica that has been able for longest, while there are both."""
        queue, able, kv_tokens = self._queue, self._able, self._model.kv_tokens
        while queue and able:
            job = queue[0]
            need = self._inputs[job] + self._outputs[job]
            for replica in able:  # mostly the first has room
                if replica.kv + need <= kv_tokens or not replica.running:
                    break
            else:
                return  # it waits for room, and all others behind it: nobody overtakes
            able.remove(replica)
            replica.is_able = False
            queue.popleft()
            self._begin(replica, job, need)

    def _begin(self, replica: Replica, job: int, need: int) -> None:
        self._waiting_tokens -= self._inputs[job]
        replica.running += 1
        replica.served += 1
        replica.kv += need
        if self._model.is_parallel:
            self._begin_parallel(replica, job)
            return
        self._advance(replica)
        replica.job = job
        replica.left = self._to_prefill(replica, job)
        replica.begun_s = self._now
        self._schedule(replica)

    def _to_prefill(self, replica: Replica, job: int) -> float:
        return self._inputs[job] + self._made[job]

    # -- one replica ----------------------------------------------------------------------------------------------

    def _advance(self, replica: Replica) -> None:
        """Bring its counts up to now, at the speeds since the last event."""
        passed = self._now - replica.at
        replica.at = self._now
        if replica.decoding:
            replica.steps += passed * replica.rate
        if replica.job >= 0:
            share = self._model.prefill_share if replica.decoding else 1.0
            replica.left -= passed * share * self._model.prefill_tokens_per_s

    def _schedule(self, replica: Replica) -> None:
        """Its next event, from now on, at the speeds that hold until then; what was planned before is void."""
        model, count = self._model, len(replica.decoding)
        if model.is_parallel:
            self._plan(replica, replica.decoding[0][0] if count else NEVER)
            return
        at = NEVER
        if replica.job >= 0:
            share = model.prefill_share if count else 1.0
            at = replica.left / (share * model.prefill_tokens_per_s)
        if count:
            step_s = model.step_s * (model.idle_step_share + (1 - model.idle_step_share) * count / model.slots)
            replica.rate = (1.0 if replica.job < 0 else 1 - model.prefill_share) / step_s
            if replica.rate > 0:
                at = min(at, (replica.decoding[0][0] - replica.steps) / replica.rate)
        self._plan(replica, self._now + max(at, 0.0))

    def _plan(self, replica: Replica, at: float) -> None:
        replica.version += 1
        if at < NEVER:
            self._push(at, replica, replica.version, _STEP)

    def _step(self, replica: Replica) -> None:
        """A prompt is done, or a sequence is."""
        self._advance(replica)
        if self._model.is_parallel:
            self._end_sequences(replica, self._now)
        else:
            if replica.job >= 0 and replica.left <= _DONE * 1e4:
                self._end_prefill(replica)
            self._end_sequences(replica, replica.steps + _DONE)
        version = replica.version
        self._offer(replica)
        if self._queue:
            self._dispatch()
        if replica.version == version:  # else it has begun another, and that has planned anew
            self._schedule(replica)
        if replica.is_draining and not replica.running:
            self._leave(replica)

    def _end_prefill(self, replica: Replica) -> None:
        job = replica.job
        replica.job, replica.left = -1, 0.0
        self._prefill_s += self._now - replica.begun_s
        self._prefilled_tokens += self._inputs[job] + self._made[job]
        self._note_first(job)
        left = self._outputs[job] - max(self._made[job], 1)
        self._made[job] = max(self._made[job], 1)
        if left <= 0:
            self._end(replica, job)
        else:
            heapq.heappush(replica.decoding, (replica.steps + left, job, replica.steps))

    def _note_first(self, job: int) -> None:
        if self._first[job] < NEVER:
            return
        self._first[job] = self._now
        ttft, slo = self._now - self._arrivals[job], self._slo[job]
        self._firsts += 1
        self._firsts_met += ttft <= slo
        if self._policy.wants_p90:
            self._recent.append((self._now, ttft / slo))

    def _end_sequences(self, replica: Replica, until: float) -> None:
        decoding = replica.decoding
        while decoding and decoding[0][0] <= until:
            self._end(replica, heapq.heappop(decoding)[1])

    def _end(self, replica: Replica, job: int) -> None:
        self._last[job] = self._now
        self._finished += 1
        self._decoded_tokens += self._outputs[job] - 1
        self._decode_s += self._now - self._first[job]
        replica.running -= 1
        replica.kv -= self._inputs[job] + self._outputs[job]

    def _begin_parallel(self, replica: Replica, job: int) -> None:
        """Everything of it is known at once; `steps` is not used, ends are times."""
        prefill_s = self._inputs[job] / self._model.prefill_tokens_per_s
        now, self._now = self._now, self._now + prefill_s
        self._prefill_s += prefill_s
        self._prefilled_tokens += self._inputs[job]
        self._note_first(job)
        end = self._now + (self._outputs[job] - 1) * self._model.step_s
        self._now = now
        heapq.heappush(replica.decoding, (end, job, 0.0))
        self._schedule(replica)
        self._offer(replica)

    def _offer(self, replica: Replica) -> None:
        """Enter it among the able, if it is."""
        if replica.is_able or replica.job >= 0 or not replica.is_ready or replica.is_draining:
            return
        if replica.running < self._model.slots:
            replica.is_able = True
            self._able.append(replica)

    # -- their number ---------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._push(self._now + self._policy.period_s, None, 0, _TICK)
        if self._now > self._arrivals[-1]:
            return  # what is left is served by who is there
        target = min(max(self._policy.decide(self.signals()), 0), self._world.max_replicas)
        if target != self._target:
            self._target = target
            self._targets.append((self._now, target))
        there = [replica for replica in self._replicas if not replica.is_draining]
        for _ in range(len(there), target):
            self._start(self._order_replica())
        if len(there) > target:
            self._stop(there, len(there) - target)

    def _order_replica(self) -> Replica:
        self._order += 1
        replica = Replica(self._order, self._now)
        self._replicas.append(replica)
        return replica

    def _start(self, replica: Replica) -> None:
        world = self._world
        took_s = world.start_up_s * self._random.uniform(1 - world.jitter, 1 + world.jitter)
        self._push(self._now + took_s, replica, 0, _READY)

    def _become_ready(self, replica: Replica) -> None:
        replica.is_ready, replica.at = True, self._now
        if self._world.failures_per_hour:
            life_s = self._random.exponential(3600 / self._world.failures_per_hour)
            self._push(self._now + life_s, replica, 0, _FAIL)
        self._offer(replica)
        self._dispatch()

    def _stop(self, there: list[Replica], count: int) -> None:
        """Starting ones first, then any: Serve does not know which have work."""
        starting = [replica for replica in reversed(there) if not replica.is_ready]
        ready = [replica for replica in there if replica.is_ready]
        chosen = starting[:count]
        more = count - len(chosen)
        if more > 0:
            picks = self._random.permutation(len(ready))[:more]
            chosen += [ready[index] for index in picks]
        for replica in chosen:
            self._thrown_away += not replica.served
            replica.is_draining = True
            if replica.is_able:
                replica.is_able = False
                self._able.remove(replica)
            if replica.running:
                self._push(self._now + self._world.drain_s, replica, 0, _DRAINED)
            else:
                self._leave(replica)

    def _change(self, replica: Replica, kind: int) -> None:
        if replica.gone_s < NEVER and kind != _REQUEUE:
            return
        if kind == _READY:
            if not replica.is_draining:
                self._become_ready(replica)
        elif kind == _DRAINED:
            self._hand_back(replica, 0.0)
            self._leave(replica)
        elif kind == _FAIL:
            self._hand_back(replica, self._world.lease_s)
            self._leave(replica)
            if not replica.is_draining:
                self._start(self._order_replica())  # Serve puts another in its place
        elif kind == _REQUEUE:
            for job in reversed(replica.orphans):
                self._queue.appendleft(job)
                self._waiting_tokens += self._inputs[job]
            replica.orphans = []
            self._dispatch()

    def _hand_back(self, replica: Replica, after_s: float) -> None:
        """What runs goes to the front of the queue, and is prefilled again with what it has made."""
        self._advance(replica)
        jobs = [] if replica.job < 0 else [replica.job]
        for _, job, begin in replica.decoding:
            if not self._model.is_parallel:
                self._made[job] = min(self._made[job] + int(replica.steps - begin), self._outputs[job] - 1)
            jobs.append(job)
        replica.decoding, replica.job, replica.running, replica.orphans = [], -1, 0, sorted(jobs)
        if replica.is_able:
            replica.is_able = False
            self._able.remove(replica)
        self._push(self._now + after_s, replica, 0, _REQUEUE)

    def _leave(self, replica: Replica) -> None:
        if replica.gone_s == NEVER:
            replica.gone_s = self._now
            replica.version += 1
            self._replicas.remove(replica)
            self._gone.append(replica)

    # -- what is seen of it ---------------------------------------------------------------------------------------

    def signals(self) -> Signals:
        """The same that the broker tells: counts, sums since the start, and measured rates."""
        there, now = self._replicas, self._now
        ready = sum(replica.is_ready and not replica.is_draining for replica in there)
        draining = sum(replica.is_draining for replica in there)
        return Signals(
            at_s=now,
            waiting=len(self._queue),
            waiting_tokens=self._waiting_tokens,
            oldest_s=now - self._arrivals[self._queue[0]] if self._queue else 0.0,
            running=sum(replica.running for replica in there),
            ready=ready,
            starting=len(there) - ready - draining,
            arrived_jobs=self._arrived_jobs,
            arrived_tokens=self._arrived_tokens,
            prefilled_tokens=self._prefilled_tokens,
            prefill_s=self._prefill_s,
            firsts=self._firsts,
            firsts_met=self._firsts_met,
            decoded_tokens=self._decoded_tokens,
            decode_s=self._decode_s,
            kv_tokens=sum(replica.kv for replica in there),
            ttft_p90=self._ttft_p90() if self._policy.wants_p90 else 0.0,
        )

    def _ttft_p90(self) -> float:
        recent = self._recent
        while recent and recent[0][0] < self._now - 60:
            recent.popleft()
        if not recent:
            return 0.0
        shares = sorted(share for _, share in recent)
        return shares[int(0.9 * (len(shares) - 1))]

    def _result(self) -> Run:
        trace, end = self._trace, self._arrivals[-1]
        first, last = np.array(self._first), np.array(self._last)
        many = trace.output_tokens > 1
        with np.errstate(invalid="ignore"):
            tpot = np.where(many, (last - first) / np.maximum(trace.output_tokens - 1, 1), 0.0)
        tpot[np.isnan(tpot)] = NEVER
        lives = [
            (each.ordered_s, min(each.gone_s, end)) for each in [*self._gone, *self._replicas] if each.ordered_s < end
        ]
        ttft = first - trace.arrival_s
        return Run(trace, self._world, ttft, tpot, self._slos(), self._targets, lives, self._thrown_away, self._order)


_TICK, _STEP, _READY, _DRAINED, _FAIL, _REQUEUE, AGAIN = range(7)
