"""Is all well? One word and its reasons, from a snapshot: what a person, or a script, wants to know first."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from headrace.broker import errors
from headrace.broker.errors import HeadraceError
from headrace.broker.settings import Settings

if TYPE_CHECKING:
    from headrace.broker.snapshot import ModelNow, Snapshot

State = Literal["well", "strained", "failing"]
_ORDER: tuple[State, ...] = ("well", "strained", "failing")

_FULL, _FILLING = 0.8, 0.6
"""Shares of the broker's memory: from the first on nothing is admitted."""
_OLD = 0.5
"""Share of `queue_timeout_s`: what has waited for longer will soon time out."""
_FEW = 10
"""A share of fewer requests says nothing."""
_FAILED, _FAILING = 0.01, 0.1
_RECENT_MS = 3_600_000
_NOT_FAILED = ("ok", "accepted", "cancelled", "disconnected", "drained")
_REFUSALS = ("queue_full", "no_capacity", "broker_full")


class Reason(Struct, frozen=True):
    """One sentence, and how much it matters."""

    state: State
    text: str


class Verdict(Struct, frozen=True):
    """The worst of the reasons; well if there is none."""

    state: State = "well"
    reasons: list[Reason] = []


class Trouble(Struct, frozen=True):
    """What stands in place of a snapshot while there can be none."""

    at_ms: int
    verdict: Verdict

    @staticmethod
    def of(error: HeadraceError) -> Trouble:
        said = error.message or error.code
        return Trouble(round(time.time() * 1000), Verdict("failing", [Reason("failing", said)]))


def judged(seen: Snapshot, settings: Settings) -> Snapshot:
    """The snapshot with its verdict."""
    reasons = [*_of_broker(seen), *_of_requests(seen)]
    for model in seen.models:
        reasons += _of_capacity(model)
        reasons += _of_service(model, settings.queue.queue_timeout_s)
    reasons.sort(key=lambda reason: -_ORDER.index(reason.state))
    return replace(seen, verdict=Verdict(reasons[0].state if reasons else "well", reasons))


def _of_broker(seen: Snapshot) -> Iterator[Reason]:
    if seen.memory_used >= _FULL:
        yield Reason("failing", f"the broker's memory is {seen.memory_used:.0%} full: nothing new is admitted")
    elif seen.memory_used >= _FILLING:
        yield Reason("strained", f"the broker's memory is {seen.memory_used:.0%} full")
    if not seen.pods:
        yield Reason("failing", "there is no pod")


def _of_requests(seen: Snapshot) -> Iterator[Reason]:
    recent = seen.recent
    ended = sum(recent.requests.values())
    failed = {outcome: count for outcome, count in recent.requests.items() if _is_failure(outcome)}
    share = sum(failed.values()) / max(ended, _FEW)
    if share >= _FAILED:
        state: State = "failing" if share >= _FAILING else "strained"
        yield Reason(state, f"{sum(failed.values())} of {ended} requests failed ({_words(failed)})")
    if refused := {why: count for why, count in recent.rejections.items() if why in _REFUSALS}:
        yield Reason("strained", f"{sum(refused.values())} requests were refused ({_words(refused)})")
    if moved := sum(recent.failovers.values()):
        yield Reason("strained", f"{moved} jobs went on at another replica ({_words(recent.failovers)})")
    if lost := recent.resumes.get("lost", 0):
        yield Reason("failing", f"{lost} streams could not be resumed: their log was lost")
    if dead := [letter for letter in seen.dead if letter.died_ms > seen.at_ms - _RECENT_MS]:
        yield Reason("strained", f"{len(dead)} dead letters in the last hour")


def _of_capacity(model: ModelNow) -> Iterator[Reason]:
    waiting, ready, starting = sum(model.waiting.values()), model.states["ready"], model.states["starting"]
    if ready >= model.wanted and (ready or not waiting):
        return
    if ready:
        yield Reason("strained", f"{model.name}: {ready} of {model.wanted} replicas are ready")
    elif starting:
        yield Reason("strained", f"{model.name}: no replica is ready, {starting} starting")
    else:
        why = model.problem or "there is no replica"
        yield Reason("failing", f"{model.name}: {why}" + (f", and {waiting} requests wait" * bool(waiting)))


def _of_service(model: ModelNow, queue_timeout_s: float) -> Iterator[Reason]:
    if model.oldest_s > _OLD * queue_timeout_s:
        yield Reason("failing", f"{model.name}: a request has waited for {model.oldest_s:.0f} s")
    elif model.oldest_s > 10 * model.ttft.slo_ms / 1000:
        yield Reason("strained", f"{model.name}: a request has waited for {model.oldest_s:.0f} s")
    for name, seen in (("first tokens", model.ttft), ("requests' tokens", model.itl)):
        if seen.met is not None and seen.count >= _FEW and seen.met < model.attainment:
            share = 1 - seen.met
            yield Reason("strained", f"{model.name}: {share:.1%} of {name} came later than {seen.slo_ms:g} ms")


def _is_failure(outcome: str) -> bool:
    """Is it ours, and not what the caller asked or did?"""
    return outcome not in _NOT_FAILED and (outcome.startswith("log_") or errors.from_failure(outcome).status >= 500)


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{word} {count}" for word, count in sorted(counts.items()))
