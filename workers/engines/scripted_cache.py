"""A model of an engine's prefix cache, for the scripted engine: which tokens of a prompt it has seen in that place."""

from __future__ import annotations

from collections import OrderedDict

BLOCK_TOKENS = 16
_BLOCK_BYTES = 4 * BLOCK_TOKENS


class PrefixCache:
    """Blocks of 16 tokens (64 bytes), each named by all that is before it; those used longest ago are forgotten."""

    def __init__(self, tokens: int) -> None:
        self._blocks = tokens // BLOCK_TOKENS
        self._used: OrderedDict[int, None] = OrderedDict()

    def use(self, prompt: bytes) -> int:
        """How many tokens of a prompt are there; from now on all its whole blocks are."""
        names, name = list[int](), 0
        for at in range(0, len(prompt) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            name = hash((name, prompt[at : at + _BLOCK_BYTES]))
            names.append(name)
        cached = next((index for index, name in enumerate(names) if name not in self._used), len(names))
        for name in reversed(names):  # so that the beginning stays longest
            self._used[name] = None
            self._used.move_to_end(name)
        while len(self._used) > self._blocks:
            self._used.popitem(last=False)
        return cached * BLOCK_TOKENS
