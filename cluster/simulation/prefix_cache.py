"""What replicas' prefix caches hold, block by block, and the best that any placement could come to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headrace.broker.affinity import TOKENS_PER_BYTE
from headrace.broker.prefixes import ANCHOR_BYTES, LENGTHS
from headrace.cluster.simulation.trace import BLOCK_TOKENS, Trace

UNBOUNDED = 1 << 60

_BLOCK_BYTES = BLOCK_TOKENS / TOKENS_PER_BYTE
_DEPTHS = tuple(max(1, int(length / _BLOCK_BYTES)) for length in LENGTHS)


class BlockCache:
    """An LRU of blocks. Of one prompt the end is forgotten before the beginning, as in vLLM."""

    def __init__(self, tokens: int) -> None:
        self._blocks = max(1, tokens // BLOCK_TOKENS)
        self._used: OrderedDict[int, None] = OrderedDict()

    def hits(self, blocks: Sequence[int]) -> int:
        """How many blocks of a prompt, from its beginning, are there."""
        return next((index for index, name in enumerate(blocks) if name not in self._used), len(blocks))

    def use(self, blocks: Sequence[int]) -> None:
        for name in reversed(blocks):
            self._used[name] = None
            self._used.move_to_end(name)
        while len(self._used) > self._blocks:
            self._used.popitem(last=False)


def best_share(trace: Trace, tokens: int) -> float:
    """The share of all blocks that one cache of this room, which sees every prompt as it comes, has already."""
    cache, hits = BlockCache(tokens), 0
    for blocks in trace.blocks:
        hits += cache.hits(blocks)
        cache.use(blocks)
    return hits / sum(map(len, trace.blocks))


def prefix_of(blocks: Sequence[int]) -> bytes:
    """The anchors (`broker/prefixes.py`) of a prompt of which only its blocks are known."""
    depths = [depth for depth in _DEPTHS if depth <= len(blocks)]
    return b"".join(blocks[depth - 1].to_bytes(ANCHOR_BYTES) for depth in depths)
