"""The autoscaling law: a pure function from what is seen of a model, and what is remembered, to how many replicas.

It runs in Ray Serve's controller (`policy.py`) and in the simulator (`simulation/`), the same function object. In turn:

1. *Hold.* Signals that are missing, old or not numbers change nothing.
2. *What if.* For each possible number of replicas a shadow queue gets the prompts that really arrive (`whatif.py`). It
   says which share would have missed the TTFT SLO, by the load at the time a replica would have had to be ordered for
   it. The number is the cheapest that keeps the misses within the budget. Where too little is known, square-root
   staffing stands in.
3. *Forecast.* Load a start-up time ahead (Holt: level and trend), at a bounded use.
4. *Room.* Sequences that run, against slots and KV room.
5. *Backlog.* What waits now and will still wait when a replica that is ordered now is ready: replicas that are starting
   count as there. A backlog that is gone before then needs nobody.
6. *Latency*, slowly: the share of requests that really missed moves the budget of 2, within a factor; tokens that come
   too slowly for a minute ask for one more.
7. *Asymmetry.* Up at once, in bounded steps; down only after a hold, and to the most that was wanted meanwhile. The
   hold doubles each time that a number was given up too early.

Load and backlog are in seconds of prefill: prompt tokens over the measured prefill rate of one replica. Load is the
number of replicas that prefill without pause.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from headrace.cluster import whatif
from headrace.cluster.shapes import Config, Decision, Signals, State

__all__ = ["Config", "Decision", "Signals", "State", "desired"]

_SIZE_JOBS = 50
"""The mean prompt is over about this many."""
_LEVEL_S, _TREND_S = 60.0, 300.0
_STRICT = 0.9
"""Down only if this part of what may be used would do."""
_CORRECTION = (0.25, 2.0)
_CORRECTION_JOBS = 200
_MOST = 1e6
_REGRET_HOLDS, _MOST_REGRET = 3.0, 4.0
"""Up within so many holds after down is a regret; the hold grows to 2 to the power of the second."""
_SLOW_S = 60.0
"""So long tokens may come too slowly."""


def desired(signals: Signals | None, state: State, config: Config) -> Decision:
    """How many replicas there should be, and why. Never raises for any numbers; the target is within the bounds."""
    if signals is None or not _is_sane(signals) or signals.age_s > config.stale_s:
        return _hold(state, config, "stale")
    if state.at_s is None:
        return _first(signals, config)
    passed = signals.at_s - state.at_s
    if passed <= 0:
        return _hold(state, config, "same")
    if passed > max(config.stale_s, 5.0):
        # nothing is known of the time between
        state = replace(state, at_s=signals.at_s, seen=signals)
        return _hold(state, config, "resumed")
    state = _learn(signals, state, config, passed)
    return _move(signals, state, config, *_wanted(signals, state, config))


def _is_sane(signals: Signals) -> bool:
    values = [getattr(signals, name) for name in signals.__struct_fields__]
    return all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in values)


def _bounded(number: int, config: Config) -> int:
    return max(config.min_replicas, min(number, config.max_replicas))


def _hold(state: State, config: Config, reason: str) -> Decision:
    target = _bounded(state.target, config)
    return Decision(target, reason, replace(state, target=target), target)


def _first(signals: Signals, config: Config) -> Decision:
    """After a start, or a restart of whoever calls: what is there stays, at first."""
    there = signals.ready + signals.starting
    wakes = there == 0 and signals.waiting > 0
    target = _bounded(1 if wakes else there, config)
    shadows = whatif.empty(config.max_replicas)
    state = State(
        at_s=signals.at_s,
        target=target,
        seen=signals,
        shadows=shadows,
        busy=float(signals.running),
        last_job_s=signals.at_s,
        lower_s=signals.at_s,
    )
    return Decision(target, "wake" if wakes else "first", state, target)


# -- what is learned --------------------------------------------------------------------------------------------------


def _grown(now: float, before: float) -> float:
    """Growth of a sum; one that fell has been started anew."""
    return now - before if now >= before else now


def _toward(value: float, to: float, passed: float, time_s: float) -> float:
    return value + (to - value) * (1 - math.exp(-passed / time_s))


def _learn(signals: Signals, state: State, config: Config, passed: float) -> State:
    seen = state.seen or signals
    jobs = int(_grown(signals.arrived_jobs, seen.arrived_jobs))
    tokens_per_s = _rate(signals, seen, state, config)
    work_s = _grown(signals.arrived_tokens, seen.arrived_tokens) / tokens_per_s
    size_s = state.size_s
    if jobs:
        size_s += (work_s / jobs - size_s) * (min(1.0, jobs / _SIZE_JOBS) if size_s else 1.0)
    load = work_s / passed
    quick = _toward(state.quick, load, passed, config.quick_s)
    calm = _toward(state.calm, load, passed, config.calm_s)
    level, trend = _holt(state, _whole_load(jobs, signals, seen, state, config, passed), passed)
    slack_s = config.ttft_slo_s + size_s * (config.ttft_slo_prefills * tokens_per_s / config.prefill_tokens_per_s - 1)
    firsts = _grown(signals.firsts, seen.firsts)
    missed = firsts - min(firsts, _grown(signals.firsts_met, seen.firsts_met))
    keep = math.exp(-passed / config.memory_s)
    all_jobs, all_missed = state.jobs * keep + firsts, state.missed * keep + missed
    shadows = whatif.watch(
        state.shadows,
        whatif.Arrivals(signals.at_s, passed, jobs, work_s, size_s, max(slack_s, 0.1), max(quick, calm)),
        config.start_up_s,
        config.memory_s,
        _budget(all_jobs, all_missed, config),
    )
    is_busy = bool(jobs or signals.waiting or signals.running)
    return replace(
        state,
        at_s=signals.at_s,
        seen=signals,
        tokens_per_s=tokens_per_s,
        size_s=size_s,
        quick=quick,
        calm=calm,
        level=level,
        trend=trend,
        regret=state.regret * keep,
        busy=_toward(state.busy, signals.running, passed, 60.0),
        shadows=shadows,
        jobs=all_jobs,
        missed=all_missed,
        decoded=state.decoded * keep + _grown(signals.decoded_tokens, seen.decoded_tokens),
        slow_s=_slow_s(signals, seen, state, config, passed),
        last_job_s=signals.at_s if is_busy else state.last_job_s,
    )


def _whole_load(jobs: int, signals: Signals, seen: Signals, state: State, config: Config, passed: float) -> float:
    """Replicas that what arrives keeps at work: its prompts, and as much decoding as was usual for a request."""
    tokens = _grown(signals.arrived_tokens, seen.arrived_tokens)
    return (tokens / config.prefill_tokens_per_s + jobs * _decode_s(state, config)) / passed


def _decode_s(state: State, config: Config) -> float:
    """How long the usual request keeps a replica decoding, if all slots are at work."""
    return state.decoded / state.jobs / config.decode_tokens_per_s if state.jobs else 0.0


def _holt(state: State, load: float, passed: float) -> tuple[float, float]:
    """Level and trend (Holt, 1957); the first minutes count as all that there ever was."""
    if state.level == 0 and state.trend == 0:
        return load, 0.0
    ahead = max(state.level + state.trend * passed, 0.0)
    level = _toward(ahead, load, passed, _LEVEL_S)
    return level, _toward(state.trend, (level - state.level) / passed, passed, _TREND_S)


def _rate(signals: Signals, seen: Signals, state: State, config: Config) -> float:
    """Measured prefill tokens a second of a request, over the last minutes; what is configured before that."""
    known = state.tokens_per_s or config.prefill_tokens_per_s
    tokens, took_s = (
        _grown(signals.prefilled_tokens, seen.prefilled_tokens),
        _grown(signals.prefill_s, seen.prefill_s),
    )
    if tokens <= 0 or took_s <= 0:
        return known
    # a minute of prefill, of all replicas together, replaces most of what was known; nonsense is bounded
    usual = config.prefill_tokens_per_s
    measured = min(max(tokens / took_s, usual / 1000), usual * 1000)
    return 1 / _toward(1 / known, 1 / measured, min(took_s, 30.0), 60.0)


def _budget(jobs: float, missed: float, config: Config) -> float:
    """The share that may miss, more carefully if lately more has missed than may, and less if less."""
    allowed = max(1 - config.attainment, 1e-4)
    if jobs < _CORRECTION_JOBS:
        return allowed
    ratio = allowed / max(missed / jobs, allowed / 100)
    low, high = _CORRECTION
    return allowed * min(max(math.sqrt(ratio), low), high)


def _slow_s(signals: Signals, seen: Signals, state: State, config: Config, passed: float) -> float:
    tokens = _grown(signals.decoded_tokens, seen.decoded_tokens)
    if tokens <= 0:
        return max(0.0, state.slow_s - passed)
    is_slow = _grown(signals.decode_s, seen.decode_s) / tokens > config.tpot_slo_s
    return state.slow_s + passed if is_slow else max(0.0, state.slow_s - passed)


# -- what is wanted ---------------------------------------------------------------------------------------------------


def _wanted(signals: Signals, state: State, config: Config) -> tuple[int, int, str]:
    """The most of what each part asks for; the same with margins, to which a higher number may go down; whose it is."""
    if signals.at_s - state.last_job_s >= config.idle_s and config.min_replicas == 0:
        return 0, 0, "idle"
    seen, strict = _seen(state, config)
    forecast, room = _forecast(state, config) / _use(config), _room(signals, state, config)
    asked = [
        (seen, "what_if"),
        (_up(forecast), "forecast"),
        (_up(room), "room"),
        (_backlog(signals, state, config), "backlog"),
        (signals.ready + 1 if state.slow_s > _SLOW_S and not signals.starting else 0, "latency"),
    ]
    wanted, reason = max(asked, key=lambda each: each[0])
    return max(wanted, 1), max(1, wanted, strict, _up(forecast / _STRICT), _up(room / _STRICT)), reason


def _use(config: Config) -> float:
    """What may miss more may also be served by replicas with less to spare."""
    return config.use * (1 + 2 * min(max(0.99 - config.attainment, 0.0), 0.25))


def _up(number: float) -> int:
    return math.ceil(min(number, _MOST) - 1e-9)


def _seen(state: State, config: Config) -> tuple[int, int]:
    """What the what-if says of this load; square-root staffing (Halfin, Whitt, 1981) where it knows nothing."""
    load = max(state.quick, state.calm)
    known, strict = whatif.replicas(state.shadows, load)
    if not known or not whatif.is_known(state.shadows, load):
        staffed = _up(load + config.burst * math.sqrt(load * max(2 * state.size_s, 0.1)))
        known, strict = max(known, staffed), max(strict, staffed)
    return known, strict


def _forecast(state: State, config: Config) -> float:
    """Load when a replica that is ordered now is ready."""
    return max(state.level + max(state.trend, 0.0) * (config.start_up_s + 10), 0.0)


def _room(signals: Signals, state: State, config: Config) -> float:
    """Replicas whose slots and KV room hold what runs."""
    wanted = state.busy / (config.slots * config.room)
    if config.kv_tokens:
        wanted = max(wanted, signals.kv_tokens / (config.kv_tokens * config.room))
    return wanted


def _backlog(signals: Signals, state: State, config: Config) -> int:
    """Replicas to work off what will still wait when one that is ordered now is ready, with those that start as there.

    A waiting request is its prefill and its usual decoding. What is left is to be gone within the slack that the oldest
    has, but not faster than in half a start-up time: so long it has waited for it anyway.
    """
    there = signals.ready + signals.starting
    left_s = signals.waiting_tokens / state.tokens_per_s + signals.waiting * _decode_s(state, config)
    later_s = left_s + (state.level - max(there, 1)) * config.start_up_s
    slack_s = max(config.ttft_slo_s - signals.oldest_s, 2.0)
    if signals.waiting == 0 or later_s <= slack_s * there:
        return 0
    return min(_up(state.level + later_s / max(slack_s, config.start_up_s / 2)), 2 * there + 2)


# -- how it is moved to -----------------------------------------------------------------------------------------------


def _move(signals: Signals, state: State, config: Config, wanted: int, strict: int, reason: str) -> Decision:
    target, now = state.target, signals.at_s
    goal = _bounded(wanted, config)
    if target == 0 and config.min_replicas == 0:
        if signals.waiting == 0:
            return Decision(0, "idle", state, wanted)
        goal, reason = max(goal, 1), "wake"
    if goal > target:
        moved = min(goal, max(2 * target, target + 4))
        is_regret = now - state.lowered_s < _REGRET_HOLDS * _hold_s(state, config)
        regret = min(state.regret + is_regret, _MOST_REGRET)
        state = replace(state, target=moved, lower=0, lower_s=now, regret=regret, lowered_s=-1e9)
        return Decision(moved, reason, state, wanted)
    goal = _bounded(strict if wanted else 0, config)
    if goal >= target:
        return Decision(target, "steady", replace(state, lower=0, lower_s=now), wanted)
    lower = max(state.lower, goal)
    if goal and now - state.lower_s < _hold_s(state, config):
        return Decision(target, "hold", replace(state, lower=lower), wanted)
    moved = _bounded(max(lower if goal else 0, target // 2), config)
    state = replace(state, target=moved, lower=0, lower_s=now, lowered_s=now)
    return Decision(moved, "lower" if goal else "idle", state, wanted)


def _hold_s(state: State, config: Config) -> float:
    return float(max(config.hold_s, config.start_up_s) * 2**state.regret)
