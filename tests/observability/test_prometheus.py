"""A real Prometheus finds pods and replicas by itself, and keeps what they have counted when one of them dies."""

from __future__ import annotations

import httpx
import pytest

from tests.observability.watched import MODEL, Watched
from tests.system.conftest import until

TOKENS = 'headrace_tokens_total{kind="completion"}'


def test_pods_and_replicas_are_scraped_and_say_the_same(watched: Watched) -> None:
    prometheus = watched.prometheus
    found = {target["labels"]["role"] for target in prometheus.ask("targets")["activeTargets"]}
    assert found == {"pod", "replica"}
    # pods agree on what the broker has, each process counts its own
    until(lambda: prometheus.query('count_values("v", headrace_slo_target_seconds{slo="ttft"})').values(), 10)
    pods = "count(headrace_queue_depth) / count(count by (priority) (headrace_queue_depth))"
    until(lambda: prometheus.value(pods) == 2, 20)
    until(lambda: (prometheus.value(f"count({TOKENS} > 0)") or 0) >= 2, 20)
    until(lambda: (prometheus.value("max(headrace_replica_starts_total)") or 0) >= 2, 10)
    assert prometheus.value("max(headrace_autoscaler_enabled)") == 1


def test_the_stages_of_ttft_add_up_in_prometheus_too(watched: Watched) -> None:
    prometheus = watched.prometheus
    name = "headrace_ttft_stage_seconds"
    until(lambda: prometheus.query(f"sum by (stage) (rate({name}_sum[30s]))"), 10)
    stages = prometheus.query(f"sum by (stage) ({name}_sum)")
    assert {dict(key)["stage"] for key in stages} == {"admit", "queue", "dispatch", "prefill", "append", "relay"}
    counts = set(prometheus.query(f"sum by (stage) ({name}_count)").values())
    assert len(counts) == 1


def test_a_replica_that_is_killed_takes_its_gauges_with_it_and_no_count(watched: Watched) -> None:
    prometheus = watched.prometheus
    until(lambda: (prometheus.value(f"count({TOKENS} > 0)") or 0) >= 2, 20)
    before = prometheus.value(f"sum(max_over_time({TOKENS}[1h]))")
    dead = f'{{instance="{watched.kill_a_replica()}"}}'
    assert prometheus.query(f"max_over_time(headrace_engine_slots{dead}[1m])")
    until(lambda: not prometheus.query(f"headrace_engine_running{dead}"), 20)
    until(lambda: not prometheus.query(f"up{dead}"), 20)
    until(lambda: prometheus.query('headrace_failovers_total{outcome="continued"}'), 20)
    until(lambda: prometheus.query('headrace_reaped_jobs_total{reason="lease"}'), 20)
    after = prometheus.value(f"sum(max_over_time({TOKENS}[1h]))")
    assert before is not None and after is not None and after > before
    for history in prometheus.history(f"{TOKENS}"):
        assert history == sorted(history), "a counter went down"
    until(lambda: prometheus.value('max(headrace_replicas{state="ready"})') == 2, 30)


def test_rules_are_evaluated_without_an_error(watched: Watched) -> None:
    prometheus = watched.prometheus

    def evaluated() -> list[dict[str, str]]:
        return [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in evaluated()), 20)
    assert [(rule["name"], rule.get("lastError")) for rule in evaluated() if rule["health"] != "ok"] == []
    assert len(evaluated()) > 30
    firing = {rule["name"] for rule in evaluated() if rule["type"] == "alerting" and rule["state"] == "firing"}
    assert firing <= {"HeadraceTtftBudgetBurn"}  # two cores that others use too


@pytest.mark.parametrize("series", ["headrace:waiting_jobs", "headrace:tokens:rate1m", "headrace:failed:ratio_rate5m"])
def test_recorded_series_are_there(watched: Watched, series: str) -> None:
    until(lambda: watched.prometheus.query(series), 20)


def test_a_ray_less_replicas_own_metrics_need_no_configuration(watched: Watched) -> None:
    for target in httpx.get(f"{watched.machine.urls[1]}/metrics/targets").json():
        answer = httpx.get(f"http://{target['targets'][0]}/metrics")
        assert answer.status_code == 200
        assert (MODEL in answer.text) and "_created" not in answer.text
