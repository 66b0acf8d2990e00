"""How fast a replica is, as it measures itself: what follows from that for how much it may ask for.

Everything here is one call a job, none a token. Times are seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from headrace.broker.affinity import TOKENS_PER_BYTE

EMPTY_SHARE = 0.01
"""So much of the batch may be empty on the average because the next jobs are still under way."""
_WEIGHT = 0.1  # of a new measurement
_FREES, _KNOWN_FREES = 32, 4  # slots often come free several at a time, when jobs of one batch end together
_MEMORY_S = 30.0  # of prefilling, what is older weighs half
_KNOWN_TOKENS = 4096  # from so many prefilled tokens on the rate is told


class Pace:
    """`clock` tells seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.claim_s = 0.0
        """From asking for a job until the engine could have it."""
        self.token_s = 0.0
        """Between two tokens of a sequence, which is one step of the engine."""
        self._freed: deque[float] = deque(maxlen=_FREES)
        self._owed: dict[str, int] = {}
        self._prefilling: set[str] = set()
        self._since = 0.0
        self._busy_s = self._prefilled = 0.0

    # -- what is measured -----------------------------------------------------------------------------------------

    def claimed(self, took_s: float) -> None:
        self.claim_s = _smooth(self.claim_s, took_s)

    def stepped(self, token_s: float) -> None:
        self.token_s = _smooth(self.token_s, token_s)

    def freed(self) -> None:
        """A slot has come free."""
        self._freed.append(self._clock())

    def owes(self, job_id: str, tokens: int) -> None:
        """A job was claimed with so many prompt tokens to prefill, as estimated."""
        self._owed[job_id] = tokens

    def prefills(self, job_id: str) -> None:
        """The engine has it now."""
        self._pass()
        self._prefilling.add(job_id)

    def prefilled(self, job_id: str, tokens: int = 0) -> None:
        """Its first token is there, after so many prompt tokens; or it has left without."""
        self._owed.pop(job_id, None)
        if job_id in self._prefilling:
            self._pass()
            self._prefilling.remove(job_id)
            self._prefilled += tokens

    def _pass(self) -> None:
        now = self._clock()
        if self._prefilling:
            self._busy_s += now - self._since
        self._since = now
        if self._busy_s > _MEMORY_S:
            self._busy_s, self._prefilled = self._busy_s / 2, self._prefilled / 2

    # -- what follows ---------------------------------------------------------------------------------------------

    @property
    def free_s(self) -> float:
        """How long it takes until a slot comes free, on the average of the last ones; infinite if that is not known."""
        if len(self._freed) < _KNOWN_FREES:
            return math.inf
        return (self._clock() - self._freed[0]) / len(self._freed) or math.inf

    def ahead(self, slots: int) -> int:
        """How many jobs more than slots to hold, so that the batch is full but for `EMPTY_SHARE`.

        While a claim is under way, slots come free as a Poisson process (Erlang's old assumption, good for many
        independent sequences); those that outnumber the jobs held here stay empty meanwhile. A replica whose slots come
        free seldom needs none, and then every job waits where any replica can take it.
        """
        mean = self.claim_s / self.free_s
        empty, chance, at_most, ahead = mean, math.exp(-mean), 0.0, 0
        while empty > EMPTY_SHARE * slots and ahead < slots:
            at_most += chance
            empty -= 1 - at_most
            ahead += 1
            chance *= mean / ahead
        return ahead

    def enough_tokens(self, step_tokens: int) -> int | None:
        """How many more prompt tokens can be of use before the next claim's answer: what an engine takes in the steps
        until then, less what it has; None if its prompts do not wait for each other."""
        if not step_tokens:
            return None
        steps = 1 + math.ceil(self.claim_s / self.token_s) if self.token_s else 2
        return max(0, steps * step_tokens - sum(self._owed.values()))

    @property
    def bytes_per_s(self) -> int:
        """Of prompts, while there was something to prefill; 0 until enough was."""
        if self._prefilled < _KNOWN_TOKENS or not self._busy_s:
            return 0
        return int(self._prefilled / self._busy_s / TOKENS_PER_BYTE)


def _smooth(old: float, new: float) -> float:
    return new if not old else old + _WEIGHT * (new - old)
