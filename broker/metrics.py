"""Every metric of the project, declared once: OpenTelemetry GenAI names where they exist, `headrace_` for the rest.

No label ever holds user input, a key, or an id: models come from the configuration, routes from the route table.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

Metric = Counter | Gauge | Histogram

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From accepted to the first content token, queue wait included.",
    ("model",),
    buckets=_LATENCY_S,
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
REJECTIONS = Counter("headrace_rejections_total", "Requests that were refused, by reason.", ("reason",))
AUTOSCALER_DESIRED = Gauge(
    "headrace_autoscaler_desired_replicas", "How many replicas the autoscaler last decided on.", ("model",)
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
STARTUP_SECONDS = Gauge(
    "headrace_replica_startup_seconds",
    "What this replica's start took, by phase (downloading, converting, loading, warming up, ...), and in total.",
    ("model", "phase"),
)
BROKER_UP = Gauge("headrace_broker_up", "1 if the last question to the broker was answered.")
