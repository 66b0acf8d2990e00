"""From what the broker says of a model and its replicas to the law's signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from headrace.broker.protocol import ModelStats
from headrace.cluster.law import Signals

_SUMS = ("prompt_tokens", "completion_tokens", "prefill_ms", "firsts", "firsts_met")


class Totals:
    """Sums over all replicas that there ever were, of counts that each replica keeps and takes with it."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, int]] = {}
        self._sums = dict.fromkeys((*_SUMS, "decode_ms"), 0.0)

    def add(self, replicas: Mapping[str, Mapping[str, str]]) -> Mapping[str, float]:
        """The sums, with what these replicas have done since they were last seen."""
        for replica, about in replicas.items():
            now = {name: _number(about.get(name, "0")) for name in (*_SUMS, "tpot_us")}
            before = self._last.get(replica, dict.fromkeys(now, 0))
            for name in _SUMS:
                self._sums[name] += max(0, now[name] - before[name])
            made = max(0, now["completion_tokens"] - before["completion_tokens"])
            self._sums["decode_ms"] += made * now["tpot_us"] / 1000
            self._last[replica] = now
        self._last = {replica: self._last[replica] for replica in replicas}
        return self._sums


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def together(stats: Sequence[ModelStats]) -> ModelStats:
    """A model's, the first, and its adapters': what waits for any of them waits for its replicas.

    What runs is counted by replica, so the model's own number has the adapters' in it.
    """
    own = stats[0]
    return structs.replace(
        own,
        waiting={band: sum(each.waiting[band] for each in stats) for band in own.waiting},
        oldest_ms=max(each.oldest_ms for each in stats),
        prompt_tokens=sum(each.prompt_tokens for each in stats),
        arrived_jobs=sum(each.arrived_jobs for each in stats),
        arrived_tokens=sum(each.arrived_tokens for each in stats),
    )


def signals_of(
    model: str, at_s: float, stats: ModelStats, replicas: Mapping[str, Mapping[str, str]], totals: Totals
) -> Signals:
    """One reading; `starting` is what the registry shows, whoever knows the wanted number knows better."""
    own = {replica: about for replica, about in replicas.items() if about.get("model") == model}
    sums = totals.add(own)
    states = [about.get("state") for about in own.values()]
    return Signals(
        at_s=at_s,
        waiting=sum(stats.waiting.values()),
        waiting_tokens=stats.prompt_tokens,
        oldest_s=stats.oldest_ms / 1000,
        running=stats.running,
        ready=states.count("ready"),
        starting=states.count("starting"),
        arrived_jobs=stats.arrived_jobs,
        arrived_tokens=stats.arrived_tokens,
        prefilled_tokens=sums["prompt_tokens"],
        prefill_s=sums["prefill_ms"] / 1000,
        firsts=int(sums["firsts"]),
        firsts_met=int(sums["firsts_met"]),
        decoded_tokens=sums["completion_tokens"],
        decode_s=sums["decode_ms"] / 1000,
    )
