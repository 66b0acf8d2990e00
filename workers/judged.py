"""A request as a replica sees it, for the metrics: its tokens, and its times, judged against their service levels."""

from __future__ import annotations

from headrace.broker import metrics
from headrace.broker.messages import Job
from headrace.broker.models import ServiceLevels


class Made:
    """The completion tokens of one job, as far as they are in the metrics. `counted` begins with what others made."""

    def __init__(self, model: str) -> None:
        self.counted = 0
        self._model = model
        self._has_been_read = False

    def count(self, made: int, *, is_read: bool) -> None:
        """So many there are by now; those made since somebody read are unread, unless nobody ever did."""
        fresh, self.counted = made - self.counted, made
        self._has_been_read = self._has_been_read or is_read
        if fresh:
            metrics.TOKENS.labels(self._model, "completion").inc(fresh)
            if self._has_been_read and not is_read:
                metrics.UNREAD_TOKENS.labels(self._model).inc(fresh)


def first_token(job: Job, ttft_s: float, levels: ServiceLevels) -> None:
    """The first content token was made so long after the job was admitted."""
    metrics.TIME_TO_FIRST_TOKEN.labels(job.model, "true" if job.stream else "false").observe(ttft_s)
    metrics.SLO_REQUESTS.labels(job.model, "ttft", _outcome(ttft_s, levels.ttft_s)).inc()


def later_tokens(job: Job, per_token_s: float, levels: ServiceLevels) -> None:
    """Each token after the first has taken so long, as a mean."""
    metrics.TIME_PER_OUTPUT_TOKEN.labels(job.model).observe(per_token_s)
    metrics.SLO_REQUESTS.labels(job.model, "tpot", _outcome(per_token_s, levels.tpot_s)).inc()


def _outcome(took_s: float, level_s: float) -> str:
    return "met" if took_s <= level_s else "missed"
