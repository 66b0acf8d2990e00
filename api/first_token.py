"""Where the time of a request's first content token went, as the pod sees it that admitted the request."""

from __future__ import annotations

import time

from headrace.api.stages import Stages
from headrace.broker import metrics

STAGES = ("admit", "queue", "dispatch", "prefill", "append", "relay")


class FirstToken:
    """What the pod's own clock says, in monotonic seconds; the log's part of it is in `Stages`.

    `accepted_at`: the whole request was here. `arrived_at`, `written_at`: the first content token was here, and on its
    way to the client; None before that.
    """

    def __init__(self, accepted_at: float) -> None:
        self.accepted_at = accepted_at
        self.admitted_at = time.monotonic()
        self.arrived_at: float | None = None
        self.written_at: float | None = None

    def write(self, arrived_at: float) -> None:
        """It arrived then, and is written now."""
        self.arrived_at, self.written_at = arrived_at, time.monotonic()

    def seconds(self, stages: Stages) -> dict[str, float]:
        """Each stage's part of the time to first token, which is their sum; empty as long as there is none.

        Two clocks are in it, and half a round trip: what that makes negative is 0, and the sum is right all the same.
        """
        if self.written_at is None or self.arrived_at is None:
            return {}
        logged = (stages.claimed_ms, stages.started_ms, stages.first_ms)
        marks = [self.admitted_at + (ms or 0) / 1000 for ms in logged]
        parts, at = {}, self.accepted_at
        for stage, mark in zip(STAGES, (self.admitted_at, *marks, self.arrived_at, self.written_at), strict=True):
            until = min(max(mark, at), self.written_at)
            parts[stage], at = until - at, until
        return parts

    def observe(self, stages: Stages, model: str) -> None:
        for stage, took_s in self.seconds(stages).items():
            metrics.TTFT_STAGE.labels(model, stage).observe(took_s)
