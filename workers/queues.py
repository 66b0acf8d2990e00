"""The queues of one replica: its model's, and one for each LoRA adapter, in the order in which it asks them.

An adapter that is loaded costs nothing; another one is fetched, and pushes one out. So a replica asks the queues of
what it has loaded first, and another replica may have the rest loaded. One claim in `_TURNS` asks all in turn, so that
none waits for ever behind others.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

from headrace.broker.models import Model

_TURNS = 4


class Queues:
    """`order` before each claim; `took` for each job that was claimed."""

    def __init__(self, model: Model) -> None:
        self.names = model.names
        self._most = model.adapters_loaded
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._turns = itertools.count()

    def order(self) -> list[str]:
        """All names, those that are best claimed from first; equals take turns."""
        if len(self.names) == 1:
            return self.names
        turns, turn = divmod(next(self._turns), _TURNS)
        start = (turns + turn) % len(self.names)
        names = self.names[start:] + self.names[:start]
        if turn == 0:
            return names
        return sorted(names, key=lambda name: name != self.names[0] and name not in self._loaded)  # stable

    def took(self, name: str) -> None:
        """A job of this queue runs here, so that its adapter is loaded; the one that was used least lately goes."""
        if name != self.names[0]:
            self._loaded[name] = None
            self._loaded.move_to_end(name)
            if len(self._loaded) > self._most:
                self._loaded.popitem(last=False)
