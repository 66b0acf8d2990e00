"""The way of a token: into the log, through the broker, out of a pod."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from infra.observability.generator.panels import (
    AnyPanel,
    Query,
    board,
    filled,
    graph,
    quantiles,
    rate,
)


def dashboard() -> Dashboard:
    made = board("headrace-relay", "headrace: relay and Redis", "What a token's way costs, and what happens on it.")
    return filled(made, {"The log": _log(), "The relay": _relay(), "Redis, and what each process costs": _processes()})


def _log() -> list[AnyPanel]:
    return [
        graph("Append", "One batch into the log, acknowledged.", "s", *quantiles("headrace_append_seconds")),
        graph(
            "Batches a second",
            "Of each replica.",
            "short",
            Query(rate("headrace_append_seconds_count", "instance"), "{{instance}}"),
        ),
        graph(
            "Fenced",
            "Writes that the log refused, as a newer attempt owns it; seldom is normal.",
            "short",
            Query("sum(rate(headrace_fenced_appends_total[$__rate_interval]))", "fenced"),
        ),
    ]


def _relay() -> list[AnyPanel]:
    return [
        graph(
            "Relay lag",
            "From an entry's time to its frame's write; two clocks.",
            "s",
            *quantiles("headrace_relay_lag_seconds"),
        ),
        graph(
            "Open streams",
            "By pod.",
            "short",
            Query("sum by (instance) (headrace_streams_open)", "{{instance}}"),
            is_stacked=True,
        ),
        graph(
            "Resumes",
            "Readers that came back, by outcome.",
            "short",
            Query(rate("headrace_resumes_total", "outcome"), "{{outcome}}"),
        ),
        graph(
            "Replayed",
            "Entries that were folded again for them.",
            "short",
            Query("sum(rate(headrace_replayed_events_total[$__rate_interval]))", "entries"),
        ),
        graph(
            "Failovers",
            "Jobs that a replica took over, by what came of it.",
            "short",
            Query(rate("headrace_failovers_total", "outcome"), "{{outcome}}"),
        ),
        graph(
            "Run out",
            "Jobs whose time had run out, by which.",
            "short",
            Query(rate("headrace_reaped_jobs_total", "reason"), "{{reason}}"),
        ),
    ]


def _processes() -> list[AnyPanel]:
    return [
        graph(
            "Broker memory",
            "Of its `maxmemory`.",
            "percentunit",
            Query("max(headrace_broker_memory_used_ratio)", "used"),
        ),
        graph("Broker up", "As each pod sees it.", "short", Query("headrace_broker_up", "{{instance}}")),
        graph(
            "CPU",
            "Cores, of pods and replicas.",
            "short",
            Query('rate(process_cpu_seconds_total{job=~"headrace.*"}[$__rate_interval])', "{{role}} {{instance}}"),
        ),
        graph(
            "Memory",
            "Resident, of pods and replicas.",
            "bytes",
            Query('process_resident_memory_bytes{job=~"headrace.*"}', "{{role}} {{instance}}"),
        ),
        graph(
            "Scrape time",
            "What Prometheus waits for each of them.",
            "s",
            Query('scrape_duration_seconds{job=~"headrace.*"}', "{{instance}}"),
        ),
        graph(
            "Found",
            "Pods and replicas that Prometheus reaches.",
            "short",
            Query('sum by (role) (up{job=~"headrace.*"})', "{{role}}"),
        ),
    ]
