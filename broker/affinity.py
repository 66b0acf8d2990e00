"""Which waiting job a replica takes, so that prompts meet the cache that holds their beginning.

`lua/claim.lua` is the same rule on Redis, and the simulator (`cluster/simulation/`) runs this one. There is no router:
a replica that asks for work gets, among the first jobs of equal rank, the one that it saves most prefill of; and a job
that comes wakes an idle replica that holds its prefix, if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.broker.prefixes import LENGTHS, split

WINDOW = 8
"""So many of the first jobs of a band are looked at."""
MAX_PASSED = 8
"""So often may jobs of equal rank overtake one."""
MAX_LEFT_MS = 2000
"""So long a job may be left to a replica that holds more of its prompt than the one that asks."""
TOKENS_PER_BYTE = 0.3
"""As estimated; see `api/estimate.py`."""
MAX_HOLDERS = 4
"""So many replicas are remembered for an anchor, those that served it last."""


class Candidate(NamedTuple):
    """A waiting job: its owner, start tag and charge (cost over weight), how often it was overtaken, how many bytes of
    its prompt the replica that asks holds, and any other one, and how long it is still left to that."""

    owner: str
    tag: float
    charge: float
    passed: int
    here: int
    there: int
    left_ms: int = 0


def choose(window: Sequence[Candidate]) -> int | None:
    """The index of the job to take, of the first ones in queue order; None if all are left to others.

    Of equal rank are the owners whose first job's tag is within one service quantum, the charge of the first job of
    all. A job that another replica holds more of is worth less than one that nobody holds: that one may get it.
    """
    firsts: dict[str, float] = {}
    best: int | None = None
    for index, job in enumerate(seen(window)):
        is_equal = firsts.setdefault(job.owner, job.tag) - window[0].tag <= window[0].charge
        if is_equal and not job.left_ms and (best is None or _gain(job) > _gain(window[best])):
            best = index
    return best


def seen(window: Sequence[Candidate]) -> Sequence[Candidate]:
    """The jobs that may be taken: none behind one that was overtaken too often."""
    last = next((index for index, job in enumerate(window) if job.passed >= MAX_PASSED), len(window))
    return window[: last + 1]


def left_ms(here: int, there: int, passed: int, waited_ms: int, bytes_per_s: int) -> int:
    """How long a job is still left to the replica that holds `there` bytes of its prompt, by one that holds `here`.

    To wait for that replica may cost as much as it would save, and no more: the time that this one, which prefills
    `bytes_per_s` (0: it is not known, and nothing is left), would take for what it lacks. (Rent or buy: who waits as
    long as the purchase takes pays at most twice what was best.)
    """
    if not bytes_per_s or passed >= MAX_PASSED or 2 * here >= there:
        return 0
    return max(0, min(MAX_LEFT_MS, (there - here) * 1000 // bytes_per_s) - waited_ms)


def turns(window: Sequence[Candidate], chosen: int) -> list[tuple[int, float]]:
    """The new tags of the chosen job and of those of its owner that it overtakes, by index.

    It has the first one's turn, and each of them that of the next: owners take turns as if nobody had overtaken.
    """
    own = [index for index in range(chosen + 1) if window[index].owner == window[chosen].owner]
    tags = [window[index].tag for index in own]
    return list(zip([own[-1], *own[:-1]], tags, strict=True))


def _gain(job: Candidate) -> int:
    return 2 * job.here - max(job.here, job.there)


class Holders:
    """Who has served which anchor, those that served it last first: the counterpart of the hash `prefix`."""

    def __init__(self) -> None:
        self._of: dict[bytes, list[str]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def hold(self, replica: str, prefix: bytes) -> None:
        for anchor in split(prefix):
            others = [other for other in self._of.get(anchor, []) if other != replica]
            self._of[anchor] = [replica, *others[: MAX_HOLDERS - 1]]

    def drop(self, replica: str, anchors: Iterable[bytes]) -> None:
        for anchor in anchors:
            if replica in (holders := self._of.get(anchor, [])):
                holders.remove(replica)
                if not holders:
                    del self._of[anchor]

    def here_and_there(self, replica: str, prefix: bytes, is_there: Callable[[str], bool]) -> tuple[int, int]:
        """How many bytes of a prompt a replica holds, and any other one that is there."""
        here = there = 0
        for length, holders in self._deepest(prefix):
            if not here and replica in holders:
                here = length
            if not there and any(other != replica and is_there(other) for other in holders):
                there = length
            if here and there:
                break
        return here, there

    def holders(self, prefix: bytes) -> list[str]:
        """Who holds most of a prompt first."""
        return list(dict.fromkeys(holder for _, holders in self._deepest(prefix) for holder in holders))

    def _deepest(self, prefix: bytes) -> Iterator[tuple[int, list[str]]]:
        anchors = split(prefix)
        for length, anchor in zip(reversed(LENGTHS[: len(anchors)]), reversed(anchors), strict=True):
            if holders := self._of.get(anchor):
                yield length, holders
