"""Every metric of the project, declared once: OpenTelemetry GenAI names where they exist, `headrace_` for the rest.

No label ever holds user input, a key, or an id: models come from the configuration, routes from the route table.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter and histogram, which nobody asks for

Metric = Counter | Gauge | Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STAGE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From admitted to the first content token, in the replica that makes it, queue wait included; `stream` says whether"
    " the client gets it at once.",
    ("model", "stream"),
    buckets=_LATENCY_S,
)
TTFT_STAGE = Histogram(
    "headrace_ttft_stage_seconds",
    "What a streamed request's first content token has waited for, by the pod that admitted it: admit, queue, dispatch"
    " (claimed, not yet accepted by the engine), prefill, append (into the log, acknowledged, told), relay. The sum"
    " over all stages is the time from the request's last byte to the token's write.",
    ("model", "stage"),
    buckets=_STAGE_S,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time per output token of a request, after its first.",
    ("model",),
    buckets=_STEP_S,
)
REQUEST_DURATION = Histogram(
    "gen_ai_server_request_duration_seconds",
    "From accepted to the end of the response.",
    ("model", "route", "outcome"),
    buckets=_LATENCY_S,
)
SLO_REQUESTS = Counter(
    "headrace_slo_requests_total",
    "Requests judged against a service level: ttft at their first content token, tpot at their end; outcome is met or"
    " missed.",
    ("model", "slo", "outcome"),
)
SLO_TARGET = Gauge("headrace_slo_target_seconds", "A service level, as configured.", ("model", "slo"))
REQUESTS = Counter("headrace_requests_total", "Responses that have ended.", ("route", "model", "outcome"))
QUEUE_DEPTH = Gauge("headrace_queue_depth", "Jobs that wait.", ("model", "priority"))
QUEUE_OLDEST = Gauge("headrace_queue_oldest_seconds", "Age of the job that has waited longest.", ("model",))
QUEUE_PROMPT_TOKENS = Gauge("headrace_queue_prompt_tokens", "Prompt tokens that wait, as estimated.", ("model",))
QUEUE_WAIT = Histogram(
    "headrace_queue_wait_seconds", "From admission to the first claim.", ("model",), buckets=_LATENCY_S
)
RUNNING_JOBS = Gauge("headrace_running_jobs", "Jobs that a replica holds a lease of.", ("model",))
STREAMS_OPEN = Gauge("headrace_streams_open", "Responses that are under way in this pod.", ("route",))
TOKENS = Counter("headrace_tokens_total", "Tokens, by kind: prompt, cached, completion.", ("model", "kind"))
UNREAD_TOKENS = Counter(
    "headrace_unread_tokens_total", "Completion tokens that were made after the last reader had left.", ("model",)
)
ENGINE_RUNNING = Gauge("headrace_engine_running", "Sequences in this replica's engine: its batch.", ("model",))
ENGINE_SLOTS = Gauge("headrace_engine_slots", "Sequences that this replica's engine takes at a time.", ("model",))
ENGINE_KV_USED = Gauge("headrace_engine_kv_used_ratio", "Share of this replica's KV cache that is in use.", ("model",))
ENGINE_STEPS = Counter("headrace_engine_steps_total", "Steps that this replica's engine has made.", ("model",))
ENGINE_STEP_SECONDS = Counter(
    "headrace_engine_step_seconds_total", "What these steps took; over their number it is the step time.", ("model",)
)
APPEND_SECONDS = Histogram("headrace_append_seconds", "One batch into the log, acknowledged.", buckets=_STEP_S)
RELAY_LAG = Histogram(
    "headrace_relay_lag_seconds", "From an entry's time to its frame's write, by the pod's clock.", buckets=_STEP_S
)
RESUMES = Counter("headrace_resumes_total", "Readers that came back, by outcome.", ("outcome",))
REPLAYED_EVENTS = Counter("headrace_replayed_events_total", "Entries folded again for readers that came back.")
FAILOVERS = Counter(
    "headrace_failovers_total",
    "Jobs that a replica took over: continued after their last token, restarted as they had none, finished as only the"
    " end was missing, not_continuable as the engine cannot go on with such an answer, failed as their log could not be"
    " read.",
    ("outcome",),
)
FENCED_APPENDS = Counter(
    "headrace_fenced_appends_total", "Writes that the log refused because a newer attempt owns it."
)
CANCELLATIONS = Counter("headrace_cancellations_total", "Cancelled jobs, by cause.", ("cause",))
REAPED_JOBS = Counter(
    "headrace_reaped_jobs_total",
    "Jobs whose time had run out, as this process found them: lease (its worker was lost), unread, timeout,"
    " no_capacity, max_run.",
    ("reason",),
)
FALLBACKS = Counter(
    "headrace_fallbacks_total", "Requests that another model took, as theirs refused them.", ("model", "fallback")
)
REJECTIONS = Counter("headrace_rejections_total", "Requests that were refused, by reason.", ("reason",))
AUTOSCALER_DESIRED = Gauge(
    "headrace_autoscaler_desired_replicas", "How many replicas the autoscaler last decided on.", ("model",)
)
AUTOSCALER_ENABLED = Gauge(
    "headrace_autoscaler_enabled",
    "1 if the model's number of replicas follows what waits, 0 if it is fixed.",
    ("model",),
)
AUTOSCALER_AGE = Gauge(
    "headrace_autoscaler_decision_age_seconds", "Age of its last decision that said something new.", ("model",)
)
AUTOSCALER_DECISIONS = Counter(
    "headrace_autoscaler_decisions_total",
    "Decisions of the autoscaler, as counted in the broker: every pod says the same.",
    ("model", "direction", "reason"),
)
REPLICAS = Gauge("headrace_replicas", "Replicas, by state.", ("model", "state"))
REPLICA_STARTS = Counter(
    "headrace_replica_starts_total",
    "Replicas that have come, as counted in the broker: every pod says the same. One that was silent for longer than a"
    " lease counts again.",
    ("model",),
)
STARTUP_SECONDS = Gauge(
    "headrace_replica_startup_seconds",
    "What this replica's start took, by phase (downloading, converting, loading, warming up, ...), and in total.",
    ("model", "phase"),
)
BROKER_UP = Gauge("headrace_broker_up", "1 if the last question to the broker was answered.")
BROKER_MEMORY = Gauge(
    "headrace_broker_memory_used_ratio", "Used memory over `maxmemory`, of the fullest server; 0 without that limit."
)
