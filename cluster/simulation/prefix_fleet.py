"""Fleets whose replicas remember prompts: without affinity, with ours, and with a router that hashes prefixes.

A prompt's blocks that its replica has need no prefill; they are there once the prompt that brought them is prefilled.
`Affine` runs the broker's own rule (`broker/affinity.py`) and what replicas tell it (`workers/prefixes.py`) on the
blocks' names. The number of replicas does not change here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from math import ceil
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headrace.broker.affinity import TOKENS_PER_BYTE, WINDOW, Candidate, Holders, choose, left_ms, seen
from headrace.cluster.simulation.fleet import AGAIN, Fleet
from headrace.cluster.simulation.prefix_cache import BlockCache, prefix_of
from headrace.cluster.simulation.rivals import Static
from headrace.cluster.simulation.trace import BLOCK_TOKENS, Trace
from headrace.cluster.simulation.world import Replica, ReplicaModel, World
from headrace.workers.prefixes import Served

_LOAD_BOUND = 1.25
_KEY_BLOCKS = 2


class Remembering(Fleet):
    """The base: one queue in order of arrival, and no affinity."""

    def __init__(self, trace: Trace, model: ReplicaModel, replicas: int) -> None:
        self._caches: dict[int, BlockCache] = {}
        self.hit_blocks = 0
        self.waits_s: NDArray[np.float64] = np.zeros(len(trace))
        super().__init__(trace, model, World(max_replicas=replicas), Static(replicas), replicas)

    def cache(self, replica: Replica) -> BlockCache:
        return self._caches.setdefault(replica.number, BlockCache(self._model.cache_tokens))

    def _has_room(self, replica: Replica, job: int) -> bool:
        need = self._inputs[job] + self._outputs[job]
        return replica.kv + need <= self._model.kv_tokens or not replica.running

    def _to_prefill(self, replica: Replica, job: int) -> float:
        hits = self.cache(replica).hits(self._trace.blocks[job])
        self.hit_blocks += hits
        self.waits_s[job] = self._now - self._arrivals[job]
        return max(1, self._inputs[job] - hits * BLOCK_TOKENS)

    def _end_prefill(self, replica: Replica) -> None:
        self.cache(replica).use(self._trace.blocks[replica.job])
        super()._end_prefill(replica)


class Affine(Remembering):
    """The broker's rule. A replica that gets nothing asks again when a job comes or is not left to another any more."""

    def __init__(self, trace: Trace, model: ReplicaModel, replicas: int) -> None:
        self._holders = Holders()
        self._served: dict[int, Served] = {}
        self._passed = [0] * len(trace)
        self._prefixes = [prefix_of(blocks) for blocks in trace.blocks]
        # as a replica measures it, which decodes meanwhile
        self._bytes_per_s = int(model.prefill_tokens_per_s * model.prefill_share / TOKENS_PER_BYTE)
        super().__init__(trace, model, replicas)

    def _dispatch(self) -> None:
        while self._queue and any(self._claim(replica) for replica in self._order_of_asking()):
            pass

    def _order_of_asking(self) -> Iterable[Replica]:
        """Who is woken: the holders of the youngest job, then whoever has been able for longest."""
        holders = self._holders.holders(self._prefixes[self._queue[-1]])
        able = {str(replica.number): replica for replica in self._able}
        return [*(able[name] for name in holders if name in able), *able.values()]

    def _claim(self, replica: Replica) -> bool:
        jobs = list(islice(self._queue, WINDOW))
        window = [self._candidate(replica, job, place) for place, job in enumerate(jobs)]
        chosen = choose(window)
        if chosen is not None and not self._has_room(replica, jobs[chosen]):
            return False
        if chosen is None:
            again_ms = min(job.left_ms for job in seen(window))
            self._push(self._now + again_ms / 1000 + 1e-6, None, 0, AGAIN)
            return False
        for job in jobs[:chosen]:
            self._passed[job] += 1
        self._take(replica, jobs[chosen])
        return True

    def _take(self, replica: Replica, job: int) -> None:
        self._queue.remove(job)
        self._able.remove(replica)
        replica.is_able = False
        name, prefix = str(replica.number), self._prefixes[job]
        served = self._served.setdefault(replica.number, Served(self._model.cache_tokens))
        self._holders.hold(name, prefix)
        served.serve(0, prefix, str(job).zfill(32), self._outputs[job])
        dropped = served.dropped(0)
        self._holders.drop(name, [dropped[at : at + 8] for at in range(0, len(dropped), 8)])
        self._begin(replica, job, self._inputs[job] + self._outputs[job])

    def _candidate(self, replica: Replica, job: int, place: int) -> Candidate:
        here, there = self._holders.here_and_there(str(replica.number), self._prefixes[job], lambda _: True)
        waited_ms = int((self._now - self._arrivals[job]) * 1000)
        left = left_ms(here, there, self._passed[job], waited_ms, self._bytes_per_s)
        return Candidate("", place, 1.0, self._passed[job], here, there, left)


class Hashed(Remembering):
    """A router that sends each prompt to the replica that its first blocks hash to, or the next one that is not loaded
    with more than its share of all jobs by a quarter (Mirrokni, Thorup, Zadimoghaddam, 2018); there it waits."""

    def __init__(self, trace: Trace, model: ReplicaModel, replicas: int) -> None:
        self._own: dict[int, deque[int]] = {}
        super().__init__(trace, model, replicas)

    def _dispatch(self) -> None:
        while self._queue:
            self._route(self._queue.popleft())
        for replica in list(self._able):
            if (line := self._own.get(replica.number)) and self._has_room(replica, line[0]):
                job = line.popleft()
                self._able.remove(replica)
                replica.is_able = False
                self._begin(replica, job, self._inputs[job] + self._outputs[job])

    def _route(self, job: int) -> None:
        loads = {replica.number: self._load(replica) for replica in self._replicas}
        bound = ceil(_LOAD_BOUND * (sum(loads.values()) + 1) / len(loads))
        key = self._trace.blocks[job][:_KEY_BLOCKS][-1]
        ring = sorted(self._replicas, key=lambda replica: crc32(f"{key} {replica.number}".encode()))
        chosen = next((each for each in ring if loads[each.number] + 1 <= bound), ring[0])
        self._own.setdefault(chosen.number, deque()).append(job)

    def _load(self, replica: Replica) -> int:
        return replica.running + len(self._own.get(replica.number, ()))

    def _step(self, replica: Replica) -> None:
        super()._step(replica)
        if self._own.get(replica.number):
            self._dispatch()


PLACEMENTS: dict[str, type[Remembering]] = {"none": Remembering, "affinity": Affine, "hashing": Hashed}


def placed(trace: Trace, model: ReplicaModel, replicas: int, name: str) -> Remembering:
    return PLACEMENTS[name](trace, model, replicas)
