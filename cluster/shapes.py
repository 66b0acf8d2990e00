"""What goes into the autoscaling law and what comes out of it; see `law.desired`."""

from __future__ import annotations

from msgspec import Struct

from headrace.cluster.whatif import Shadows


class Signals(Struct, frozen=True):
    """One reading of one model. Sums and counts marked with * only grow; only their growth is used."""

    at_s: float
    """When it was read, on any clock that goes on."""
    age_s: float = 0.0
    """How old it is by now."""
    waiting: int = 0
    waiting_tokens: int = 0
    oldest_s: float = 0.0
    running: int = 0
    ready: int = 0
    starting: int = 0
    arrived_jobs: int = 0
    """*"""
    arrived_tokens: int = 0
    """* Prompt tokens of these."""
    prefilled_tokens: float = 0.0
    """*"""
    prefill_s: float = 0.0
    """* What these took, summed over requests; with prefix caching less than their length says."""
    firsts: int = 0
    """* First tokens that went out."""
    firsts_met: int = 0
    """* Of these within the TTFT SLO."""
    decoded_tokens: float = 0.0
    """* Tokens after the first."""
    decode_s: float = 0.0
    """* What these took, summed over requests."""
    kv_tokens: int = 0
    """Tokens in KV caches, 0 if not known."""
    ttft_p90: float = 0.0
    """90th percentile over the last minute of TTFT over its SLO; only the simulator's rivals read it."""


class Config(Struct, frozen=True):
    """What the law is told of a model and of its service levels."""

    min_replicas: int = 1
    max_replicas: int = 8
    attainment: float = 0.99
    """The share of requests that is to have its first token within the SLO."""
    ttft_slo_s: float = 0.5
    ttft_slo_prefills: float = 1.5
    """A request's TTFT SLO is `ttft_slo_s` and so many times its own prefill time."""
    tpot_slo_s: float = 0.05
    prefill_tokens_per_s: float = 20_000.0
    """Of one replica that does nothing else; what is measured takes over."""
    decode_tokens_per_s: float = 2_560.0
    """Of one replica with all slots at work and nothing else to do."""
    slots: int = 64
    kv_tokens: int = 0
    """KV room of a replica in tokens, 0 if not known."""
    start_up_s: float = 30.0
    hold_s: float = 30.0
    """A lower number must have done for so long; the start-up time if that is longer."""
    idle_s: float = 300.0
    """Without a job for so long, `min_replicas` 0 means none."""
    stale_s: float = 10.0
    use: float = 0.9
    """Share of a replica's prefill time that forecast load may take."""
    room: float = 0.9
    """The same of slots and KV room."""
    memory_s: float = 600.0
    """How far back the what-if looks: what happened so long ago counts 1 / e."""
    quick_s: float = 45.0
    calm_s: float = 90.0
    """Time constants of the load by which the what-if tells situations apart: the larger of both counts."""
    burst: float = 2.5
    """Standard deviations of load that unknown load gets in addition."""


class State(Struct, frozen=True):
    """What is remembered between two calls. `State()` knows nothing."""

    at_s: float | None = None
    target: int = 0
    seen: Signals | None = None
    tokens_per_s: float = 0.0
    size_s: float = 0.0
    """Mean prefill time of a prompt."""
    quick: float = 0.0
    calm: float = 0.0
    level: float = 0.0
    """Replicas that prefill and decode of what arrives would keep at work, smoothed; and its growth a second."""
    trend: float = 0.0
    busy: float = 0.0
    """Mean number of sequences that run."""
    shadows: Shadows = Shadows()
    jobs: float = 0.0
    missed: float = 0.0
    """First tokens lately, and those that came too late."""
    decoded: float = 0.0
    """Tokens after the first, lately."""
    slow_s: float = 0.0
    """For how long tokens have come too slowly."""
    last_job_s: float = 0.0
    lower_s: float = 0.0
    """Since when less would do; `lower` is the most that was wanted since."""
    lower: int = 0
    regret: float = 0.0
    """How often it lately went up soon after it had gone down; each time doubles the hold."""
    lowered_s: float = -1e9


class Decision(Struct, frozen=True):
    """`wanted` is before asymmetry and bounds; `reason` one stable word."""

    target: int
    reason: str
    state: State
    wanted: int = 0
