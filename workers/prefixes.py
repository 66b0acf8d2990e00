"""What a replica's cache may hold of the prompts that it has served: for the broker, which sends it more of the same.

An engine tells nobody what it evicts. This keeps the anchors (`broker/prefixes.py`) of the prompts that were served,
the last used last, with the tokens from each to the one before, within the engine's own bound: about what an LRU of its
blocks holds. What falls out is told with the next claim.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from headrace.broker.affinity import TOKENS_PER_BYTE
from headrace.broker.prefixes import LENGTHS, split

_AT_ONCE = 256  # anchors that one claim tells; the rest waits for the next


class Served:
    """`kv_tokens` is the engine's room for prompts and answers."""

    def __init__(self, kv_tokens: int, shards: int = 1) -> None:
        self._room = kv_tokens
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._dropped: list[dict[bytes, None]] = [{} for _ in range(shards)]

    def serve(self, shard: int, prefix: bytes, job_id: str, own_tokens: int) -> None:
        """A job was claimed; `own_tokens` of it, its answer say, are beyond its anchors."""
        anchors = split(prefix)
        lengths = [0, *LENGTHS[: len(anchors)]]
        weights = [int((end - begin) * TOKENS_PER_BYTE) for begin, end in pairwise(lengths)]
        # the deepest is used first, so that of one prompt the end falls out before the beginning
        self._use(job_id.encode(), own_tokens)
        for anchor, weight in zip(reversed(anchors), reversed(weights), strict=True):
            self._use(anchor, weight)
            self._dropped[shard].pop(anchor, None)
        while self._room < 0 and len(self._tokens) > 1:
            anchor, weight = self._tokens.popitem(last=False)
            self._room += weight
            if len(anchor) < len(job_id):
                for each in self._dropped:
                    each[anchor] = None

    def dropped(self, shard: int) -> bytes:
        """Anchors that are not held any more and were not told yet."""
        waiting = self._dropped[shard]
        told = list(waiting)[:_AT_ONCE]
        for anchor in told:
            del waiting[anchor]
        return b"".join(told)

    def _use(self, anchor: bytes, weight: int) -> None:
        self._room += self._tokens.pop(anchor, 0) - weight
        self._tokens[anchor] = weight
