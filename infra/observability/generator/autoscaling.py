"""What the autoscaler sees, what it decides, and what comes of it."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from infra.observability.generator.panels import (
    AnyPanel,
    Query,
    board,
    filled,
    graph,
    model_variable,
)

OF = '{model="$model"}'
DECIDED = "headrace_autoscaler_decisions_total"


def dashboard() -> Dashboard:
    made = board(
        "headrace-autoscaling", "headrace: autoscaling", "Signals, decisions with their reasons, and replicas."
    )
    made = made.with_variable(model_variable())
    return filled(made, {"Decisions": _decisions(), "Signals": _signals()})


def _decisions() -> list[AnyPanel]:
    return [
        graph(
            "Wanted and there",
            "The autoscaler's last number, and replicas by state.",
            "short",
            Query(f"max(headrace_autoscaler_desired_replicas{OF})", "wanted"),
            Query(f"max by (state) (headrace_replicas{OF})", "{{state}}"),
            span=12,
        ),
        graph(
            "Decisions a minute",
            "By direction and reason.",
            "short",
            Query(
                f"60 * max by (direction, reason) (rate({DECIDED}{OF}[$__rate_interval]))", "{{direction}}: {{reason}}"
            ),
            span=12,
        ),
        graph(
            "Last news",
            "Age of the last decision that said something new.",
            "s",
            Query(f"max(headrace_autoscaler_decision_age_seconds{OF})", "age"),
        ),
        graph(
            "Alive",
            "Decisions of any kind a second; none for minutes is a stuck autoscaler.",
            "short",
            Query(f"max(sum by (instance) (rate({DECIDED}{OF}[$__rate_interval])))", "decisions"),
        ),
        graph(
            "Replicas that have come",
            "In 15 minutes; more than there are, again and again, is a crash loop.",
            "short",
            Query(f"max(increase(headrace_replica_starts_total{OF}[15m]))", "starts"),
        ),
    ]


def _signals() -> list[AnyPanel]:
    return [
        graph("Waiting jobs", "", "short", Query(f"max by (priority) (headrace_queue_depth{OF})", "{{priority}}")),
        graph("Waiting prompt tokens", "", "short", Query(f"max(headrace_queue_prompt_tokens{OF})", "tokens")),
        graph("Oldest wait", "", "s", Query(f"max(headrace_queue_oldest_seconds{OF})", "oldest")),
        graph("Running jobs", "", "short", Query(f"max(headrace_running_jobs{OF})", "running")),
        graph(
            "Late first tokens",
            "Share beyond the TTFT SLO, 5 minutes.",
            "percentunit",
            Query(f"headrace:ttft_missed:ratio_rate5m{OF}", "late"),
        ),
        graph(
            "Start-up time",
            "Total, of the replicas that are there.",
            "s",
            Query('max(headrace_replica_startup_seconds{model="$model",phase="total"})', "total"),
        ),
    ]
