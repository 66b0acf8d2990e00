"""What a load run is to do, and what came of it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.cli.load_checks import Check, OracleCheck


@dataclass(frozen=True)
class Plan:
    """What to ask, how often and how fast."""

    urls: list[str]
    model: str
    streams: int | None = 20
    """Closed loop; None for open."""
    rate: float = 0.0
    """Open loop: requests a second, on average."""
    requests: int | None = None
    duration_s: float | None = None
    """No request is begun after this; those that run are finished."""
    max_tokens: int = 64
    prompt_bytes: int = 64
    resume_every: int = 0
    seed: int = 0
    api_key: str | None = None
    check: Callable[[str, int], Check] = OracleCheck


@dataclass
class Totals:
    """What came of it; times are in seconds."""

    ttft: array[float] = field(default_factory=lambda: array("d"))
    itl: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    begun: int = 0
    done: int = 0
    resumes: int = 0
    mismatches: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0
    client_cpu_s: float = 0.0
