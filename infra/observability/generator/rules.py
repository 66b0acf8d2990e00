"""Recording and alert rules, as Prometheus reads them and as a PrometheusRule of its Kubernetes operator.

Error budgets over 30 days: 1 % of first tokens may be later than the model's TTFT SLO, 0.1 % of requests may fail.
Windows and factors are the multi-window, multi-burn-rate ones of https://sre.google/workbook/alerting-on-slos/.
"""

from __future__ import annotations

from typing import Any

from headrace.broker.errors import BY_CODE

Rule = dict[str, Any]

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
TTFT_BUDGET = 0.01
ERROR_BUDGET = 0.001
BURNS = (
    ("page", 14.4, "1h", "5m"),
    ("page", 6.0, "6h", "30m"),
    ("ticket", 3.0, "1d", "2h"),
    ("ticket", 1.0, "3d", "6h"),
)
"""Severity, factor, long window, short window."""

FAULTS = "|".join(
    sorted({code for code, kind in BY_CODE.items() if kind.status >= 500 and code != "config_error"} | {"log_lost"})
)
"""Error codes that are the deployment's fault and not its caller's."""
LEFT = "disconnected|drained|accepted"
"""Outcomes that say nothing of an answer: its reader left, goes on elsewhere, or never was."""


def groups() -> list[Rule]:
    """All rules. What every pod says the same of is a `max`, what each process has of its own a `sum`."""
    return [
        {"name": "headrace-slo", "rules": [rule for window in WINDOWS for rule in _ratios(window)]},
        {"name": "headrace-service", "rules": _series()},
        {"name": "headrace-budgets", "rules": _budgets()},
        {"name": "headrace-alerts", "rules": _alerts()},
    ]


def _ratios(window: str) -> list[Rule]:
    """The shares of an error budget's two kinds of requests: what was too late, what failed."""
    ttft = 'sum by (model) (rate(headrace_slo_requests_total{slo="ttft"%s}[' + window + "]))"
    failed = (
        f'(sum(rate(headrace_requests_total{{outcome=~"{FAULTS}"}}[{window}])) or vector(0))'
        f' + (sum(rate(headrace_rejections_total{{reason=~"{FAULTS}"}}[{window}])) or vector(0))'
    )
    answered = f'(sum(rate(headrace_requests_total{{outcome!~"{LEFT}|{FAULTS}"}}[{window}])) or vector(0))'
    late = ttft % ',outcome="missed"'
    return [
        {"record": f"headrace:ttft_missed:ratio_rate{window}", "expr": f"{late} / {ttft % ''}"},
        {"record": f"headrace:failed:ratio_rate{window}", "expr": f"({failed}) / ({answered} + {failed})"},
    ]


def _series() -> list[Rule]:
    """What dashboards and people ask for again and again."""
    return [
        _record("headrace:tokens:rate1m", 'sum by (model) (rate(headrace_tokens_total{kind="completion"}[1m]))'),
        _record("headrace:requests:rate5m", "sum by (model, outcome) (rate(headrace_requests_total[5m]))"),
        _record(
            "headrace:ttft_seconds:p95_5m",
            "histogram_quantile(0.95, sum by (le, model) (rate(gen_ai_server_time_to_first_token_seconds_bucket[5m])))",
        ),
        _record("headrace:waiting_jobs", "sum by (model) (max by (model, priority) (headrace_queue_depth))"),
    ]


def _record(name: str, expr: str) -> Rule:
    return {"record": name, "expr": expr}


def _budgets() -> list[Rule]:
    return [
        _burn(name, series, budget, summary, burn)
        for name, series, budget, summary in (
            (
                "HeadraceTtftBudgetBurn",
                "headrace:ttft_missed",
                TTFT_BUDGET,
                "First tokens of {{ $labels.model }} come late",
            ),
            ("HeadraceErrorBudgetBurn", "headrace:failed", ERROR_BUDGET, "Requests fail"),
        )
        for burn in BURNS
    ]


def _burn(name: str, series: str, budget: float, summary: str, burn: tuple[str, float, str, str]) -> Rule:
    severity, factor, long, short = burn
    limit = round(factor * budget, 6)
    expr = f"{series}:ratio_rate{long} > {limit} and {series}:ratio_rate{short} > {limit}"
    told = (
        f"{summary}: {{{{ $value | humanizePercentage }}}} in the last {long}, {factor:g} times what the budget allows."
    )
    return _alert(name, expr, "2m" if severity == "page" else "15m", severity, told, window=long)


def _alert(name: str, expr: str, wait: str, severity: str, summary: str, **labels: str) -> Rule:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity, **labels},
        "annotations": {"summary": summary, "runbook_url": f"docs/operations.md#{name.lower()}"},
    }


def _new(counter: str, by: str, window: str) -> str:
    """A counter has grown, or has come: its first value is growth that `increase` does not see."""
    new = f"{counter} unless {counter} offset {window}"
    return f"(sum by ({by}) (increase({counter}[{window}])) > 0 or sum by ({by}) ({new}) > 0)"


def _alerts() -> list[Rule]:
    decided = "max by (model) (sum by (model, instance) (increase(headrace_autoscaler_decisions_total[5m])))"
    starts = "max by (model) (increase(headrace_replica_starts_total[15m]))"
    more = "clamp_min(max by (model) (sum by (model, instance) (delta(headrace_replicas[15m]))), 0)"
    unread = "sum by (model) (rate(headrace_unread_tokens_total[15m]))"
    append = "histogram_quantile(0.99, sum by (le) (rate(headrace_append_seconds_bucket[5m])))"
    refused = _new('headrace_rejections_total{reason="no_capacity"}', "reason", "5m")
    dead = _new('headrace_requests_total{outcome="too_many_deaths"}', "model", "15m")
    none_ready = 'max by (model) (headrace_replicas{state="ready"}) == 0'
    return [
        _alert(
            "HeadraceQueueOld",
            "max by (model) (headrace_queue_oldest_seconds) > 30",
            "2m",
            "page",
            "A request for {{ $labels.model }} has waited for {{ $value | humanizeDuration }}.",
        ),
        _alert(
            "HeadraceNoCapacity",
            f"(headrace:waiting_jobs > 0 and on (model) {none_ready}) or {refused}",
            "1m",
            "page",
            "Requests wait or are refused, and no replica of {{ $labels.model }} is ready.",
        ),
        _alert(
            "HeadraceReplicaCrashLoop",
            f"{starts} - {more} > 3",
            "2m",
            "page",
            "{{ $value | humanize }} replicas of {{ $labels.model }} have started in 15 minutes, and few are more.",
        ),
        _alert(
            "HeadraceAppendSlow",
            f"{append} > 0.05",
            "10m",
            "ticket",
            "One append in a hundred takes {{ $value | humanizeDuration }}: the broker's core or disk is full.",
        ),
        _alert(
            "HeadraceBrokerMemory",
            "max(headrace_broker_memory_used_ratio) > 0.7",
            "5m",
            "page",
            "The broker uses {{ $value | humanizePercentage }} of its memory; at 80 % new requests are refused.",
        ),
        _alert("HeadraceBrokerDown", "max(headrace_broker_up) == 0", "1m", "page", "No pod reaches the broker."),
        _alert(
            "HeadraceUnreadTokens",
            f'{unread} / sum by (model) (rate(headrace_tokens_total{{kind="completion"}}[15m])) > 0.1',
            "15m",
            "ticket",
            "{{ $value | humanizePercentage }} of {{ $labels.model }}'s tokens are made for readers that have left.",
        ),
        _alert(
            "HeadraceAutoscalerStuck",
            f"max by (model) (headrace_autoscaler_enabled) == 1 unless on (model) {decided} > 0",
            "5m",
            "page",
            "The autoscaler of {{ $labels.model }} has decided nothing for five minutes.",
        ),
        _alert(
            "HeadraceDeadLetters",
            dead,
            "0m",
            "ticket",
            "Requests for {{ $labels.model }} have killed one worker after another, and are dead letters now.",
        ),
        _alert(
            "HeadraceTargetDown",
            'max by (instance, role) (up{job=~"headrace.*"}) == 0',
            "2m",
            "ticket",
            "The {{ $labels.role }} at {{ $labels.instance }} is in the registry, and does not say its metrics.",
        ),
    ]


def prometheus_rule() -> Rule:
    """The same rules for the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "headrace"},
        "spec": {"groups": groups()},
    }
