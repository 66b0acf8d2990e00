"""Is all well? The whole deployment on one page."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from infra.observability.generator.panels import (
    AnyPanel,
    Query,
    board,
    filled,
    graph,
    number,
    quantiles,
    rate,
)

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"


def dashboard() -> Dashboard:
    made = board("headrace-overview", "headrace: service overview", "Whether all is well, and if not, where to look.")
    return filled(made, {"": _now(), "What clients see": _clients(), "Models": _models()})


def _now() -> list[AnyPanel]:
    return [
        number(
            "Requests a second", "Responses that have ended.", "reqps", Query("sum(rate(headrace_requests_total[1m]))")
        ),
        number("Tokens a second", "Completion tokens of all models.", "short", Query("sum(headrace:tokens:rate1m)")),
        number("Open streams", "In all pods.", "short", Query("sum(headrace_streams_open)")),
        number("Waiting", "Jobs in the queues.", "short", Query("sum(headrace:waiting_jobs)"), warn=50, bad=500),
        number(
            "Oldest wait",
            "The job that has waited longest.",
            "s",
            Query("max(headrace_queue_oldest_seconds)"),
            warn=5,
            bad=30,
        ),
        number(
            "Failed, 5 min",
            "Share of requests that failed by our fault.",
            "percentunit",
            Query("headrace:failed:ratio_rate5m"),
            warn=0.001,
            bad=0.01,
        ),
        number(
            "TTFT p95", "Over all models, 5 minutes.", "s", Query("max(headrace:ttft_seconds:p95_5m)"), warn=0.5, bad=2
        ),
        number(
            "Late first tokens",
            "Share beyond the model's TTFT SLO, worst model, 5 minutes.",
            "percentunit",
            Query("max(headrace:ttft_missed:ratio_rate5m)"),
            warn=0.01,
            bad=0.1,
        ),
        number(
            "Replicas ready",
            "Of all models.",
            "short",
            Query('sum(max by (model) (headrace_replicas{state="ready"}))'),
            warn=1,
            bad=0.5,
        ),
        number("Pods", "That Prometheus reaches.", "short", Query('sum(up{role="pod"})'), warn=2, bad=1),
        number("Broker", "1: every pod reaches it.", "short", Query("min(headrace_broker_up)"), warn=1, bad=0.5),
        number(
            "Broker memory",
            "Of its `maxmemory`; at 80 % new requests are refused.",
            "percentunit",
            Query("max(headrace_broker_memory_used_ratio)"),
            warn=0.5,
            bad=0.7,
        ),
    ]


def _clients() -> list[AnyPanel]:
    return [
        graph(
            "Requests by outcome",
            "ok, disconnected (the client left), or an error's code.",
            "reqps",
            Query(rate("headrace_requests_total", "outcome"), "{{outcome}}"),
            is_stacked=True,
        ),
        graph("Time to first token", "Queue wait included.", "s", *quantiles(TTFT)),
        graph("Time per output token", "After the first.", "s", *quantiles(TPOT)),
        graph(
            "Refused",
            "Requests that made no job, by reason.",
            "reqps",
            Query(rate("headrace_rejections_total", "reason"), "{{reason}}"),
        ),
        graph(
            "Cancelled",
            "Jobs, by cause.",
            "reqps",
            Query(rate("headrace_cancellations_total", "cause"), "{{cause}}"),
        ),
        graph(
            "Request duration, p95",
            "Of those that ended well, by route.",
            "s",
            Query(
                "histogram_quantile(0.95, sum by (le, route)"
                ' (rate(gen_ai_server_request_duration_seconds_bucket{outcome="ok"}[$__rate_interval])))',
                "{{route}}",
            ),
        ),
    ]


def _models() -> list[AnyPanel]:
    return [
        graph(
            "Tokens a second, by model",
            "Completion tokens.",
            "short",
            Query("headrace:tokens:rate1m", "{{model}}"),
            is_stacked=True,
        ),
        graph(
            "Waiting by priority",
            "Jobs in the queues of all models.",
            "short",
            Query("sum by (priority) (max by (model, priority) (headrace_queue_depth))", "{{priority}}"),
            is_stacked=True,
        ),
        graph(
            "Replicas",
            "By model and state.",
            "short",
            Query("max by (model, state) (headrace_replicas)", "{{model}} {{state}}"),
        ),
        graph(
            "Error budget burn, TTFT",
            "Share of late first tokens, 1 hour; the budget is 1 %.",
            "percentunit",
            Query("headrace:ttft_missed:ratio_rate1h", "{{model}}"),
            span=12,
        ),
        graph(
            "Error budget burn, failures",
            "Share of failed requests, 1 hour; the budget is 0.1 %.",
            "percentunit",
            Query("headrace:failed:ratio_rate1h", "failed"),
            span=12,
        ),
    ]
