"""What vLLM says of each step of its engine core, kept for metrics of our own; importing this module takes seconds."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger

from headrace.workers.engines.protocol import Figures


class EngineStats(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not always there to be read
    """vLLM makes it and calls it. It is of this class so that vLLM adds none of its own: a hundred more metrics, under
    names that change, in our registry."""

    def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
        self.figures = Figures(0)
        self._recorded_at = 0.0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called with what a step has made; the time since the call before is the step's, if something ran then."""
        if scheduler_stats is None:
            return
        now, last = time.perf_counter(), self.figures
        step_s = now - self._recorded_at if last.running else 0.0
        self._recorded_at = now
        self.figures = Figures(
            scheduler_stats.num_running_reqs,
            scheduler_stats.kv_cache_usage,
            last.steps + bool(last.running),
            last.step_s + step_s,
        )

    def log_engine_initialized(self) -> None:
        pass

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        pass

    def record_admission_rejection(self, reason: str) -> None:
        pass
