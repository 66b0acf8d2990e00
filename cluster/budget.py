"""How GPUs are shared by models that want more than there are: a pure function, the same in every model's policy."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class Want(Struct, frozen=True):
    """`wanted` replicas of `gpus` each; `least` of them come before all else. The larger `priority` goes first."""

    model: str
    wanted: int
    least: int
    gpus: float
    priority: int = 0


def split(wants: Sequence[Want], gpus: float | None) -> dict[str, int]:
    """How many replicas each model gets, never more than it wants; `gpus` None is no bound.

    First what is least, then by priority; models of one priority take turns, the one with the smallest part of its want
    first, so that nobody gets all. Models without GPUs get what they want. The order of `wants` does not matter.
    """
    if gpus is None:
        return {want.model: want.wanted for want in wants}
    ordered = sorted(wants, key=lambda want: (-want.priority, want.model))
    given = {want.model: want.wanted if want.gpus <= 0 else 0 for want in ordered}
    left = gpus
    for want in ordered:
        while want.gpus > 0 and given[want.model] < min(want.least, want.wanted) and left >= want.gpus:
            given[want.model] += 1
            left -= want.gpus
    for priority in sorted({want.priority for want in ordered}, reverse=True):
        rank = [want for want in ordered if want.priority == priority and want.gpus > 0]
        while hungry := [want for want in rank if given[want.model] < want.wanted and want.gpus <= left]:
            chosen = min(hungry, key=lambda want: (given[want.model] / want.wanted, want.model))
            given[chosen.model] += 1
            left -= chosen.gpus
    return given
