"""One model: what its requests wait for, and what its engines do."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from infra.observability.generator.panels import (
    AnyPanel,
    Query,
    board,
    filled,
    graph,
    model_variable,
    quantiles,
    rate,
)

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
OF = '{model="$model"}'


def dashboard() -> Dashboard:
    made = board("headrace-model", "headrace: one model", "Where a model's time goes, and how full its replicas are.")
    made = made.with_variable(model_variable())
    return filled(made, {"Latency": _latency(), "Queue": _queue(), "Engines": _engines()})


def _latency() -> list[AnyPanel]:
    return [
        graph("Time to first token", "And its SLO.", "s", *quantiles(TTFT, where=OF), _target("ttft")),
        graph(
            "Where the first token's time goes",
            "Mean of each stage; together they are the streams' mean TTFT.",
            "s",
            Query(
                f"{rate('headrace_ttft_stage_seconds_sum', 'stage', OF)}"
                f" / {rate('headrace_ttft_stage_seconds_count', 'stage', OF)}",
                "{{stage}}",
            ),
            is_stacked=True,
        ),
        graph("Time per output token", "And its SLO.", "s", *quantiles(TPOT, where=OF), _target("tpot")),
        graph("Stages, p95", "They do not add up: a slow request is seldom slow everywhere.", "s", *_stage_quantile()),
        graph(
            "Queue wait", "From admission to the first claim.", "s", *quantiles("headrace_queue_wait_seconds", where=OF)
        ),
        graph(
            "Service levels met",
            "Share of requests.",
            "percentunit",
            Query(
                'sum by (slo) (rate(headrace_slo_requests_total{model="$model",outcome="met"}[$__rate_interval]))'
                ' / sum by (slo) (rate(headrace_slo_requests_total{model="$model"}[$__rate_interval]))',
                "{{slo}}",
            ),
        ),
    ]


def _queue() -> list[AnyPanel]:
    return [
        graph(
            "Waiting jobs",
            "By priority; `resume` holds those whose replica was lost.",
            "short",
            Query(f"max by (priority) (headrace_queue_depth{OF})", "{{priority}}"),
            is_stacked=True,
        ),
        graph("Oldest wait", "", "s", Query(f"max(headrace_queue_oldest_seconds{OF})", "oldest")),
        graph(
            "Waiting prompt tokens", "As estimated.", "short", Query(f"max(headrace_queue_prompt_tokens{OF})", "tokens")
        ),
    ]


def _target(slo: str) -> Query:
    return Query(f'max(headrace_slo_target_seconds{{model="$model",slo="{slo}"}})', "SLO")


def _stage_quantile() -> list[Query]:
    buckets = rate("headrace_ttft_stage_seconds_bucket", "le, stage", OF)
    return [Query(f"histogram_quantile(0.95, {buckets})", "{{stage}}")]


def _engines() -> list[AnyPanel]:
    step_s, steps = (rate(f"headrace_engine_{name}_total", "instance", OF) for name in ("step_seconds", "steps"))
    tokens = "headrace_tokens_total"
    return [
        graph(
            "Batch",
            "Sequences in each replica's engine.",
            "short",
            Query(f"headrace_engine_running{OF}", "{{instance}}"),
        ),
        graph(
            "Slots in use",
            "Of all replicas.",
            "percentunit",
            Query(f"sum(headrace_engine_running{OF}) / sum(headrace_engine_slots{OF})", "in use"),
        ),
        graph(
            "KV cache in use",
            "Of each replica.",
            "percentunit",
            Query(f"headrace_engine_kv_used_ratio{OF}", "{{instance}}"),
        ),
        graph("Step time", "Mean, of each replica.", "s", Query(f"{step_s} / ({steps} > 0)", "{{instance}}")),
        graph(
            "Tokens a second",
            "Made by each replica.",
            "short",
            Query(
                f'sum by (instance) (rate({tokens}{{model="$model",kind="completion"}}[$__rate_interval]))',
                "{{instance}}",
            ),
            is_stacked=True,
        ),
        graph(
            "Prompt tokens from the cache",
            "Share of prompt tokens that needed no prefill.",
            "percentunit",
            Query(
                f'sum(rate({tokens}{{model="$model",kind="cached"}}[$__rate_interval]))'
                f' / sum(rate({tokens}{{model="$model",kind="prompt"}}[$__rate_interval]))',
                "hits",
            ),
        ),
        graph(
            "Running jobs",
            "That a replica holds a lease of.",
            "short",
            Query(f"max(headrace_running_jobs{OF})", "running"),
        ),
        graph(
            "Tokens that nobody reads",
            "Made after the last reader had left.",
            "short",
            Query(rate("headrace_unread_tokens_total", "model", OF), "unread"),
        ),
        graph(
            "Start-up",
            "Of the replicas that are there, by phase.",
            "s",
            Query(f"max by (phase) (headrace_replica_startup_seconds{OF})", "{{phase}}"),
        ),
    ]
