"""Rules and configuration as Prometheus's own tools read them; each alert has tests, a summary and a page to read."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.broker.errors import BY_CODE
from infra.observability.generator import rules
from infra.observability.generator.files import files
from tests.infra.tools import INFRA, ROOT, program, run
from tests.observability.watched import FOLDER, configured

ALERTS = [rule for group in rules.groups() for rule in group["rules"] if "alert" in rule]
NAMES = sorted({rule["alert"] for rule in ALERTS})
CASES: list[dict[str, Any]] = [
    case
    for test in yaml.safe_load((FOLDER / "rules.test.yml").read_text("utf-8"))["tests"]
    for case in test["alert_rule_test"]
]


def promtool(*arguments: str | Path, cwd: Path = FOLDER) -> str:
    return run([program("promtool", "apt-get install prometheus"), *arguments], cwd=cwd)


def test_what_is_committed_is_what_is_made() -> None:
    for path, text in files().items():
        assert (FOLDER / path).read_text("utf-8") == text, f"{path}: run `make dashboards`"
    made = {path for path in files() if path.endswith(".json")}
    assert {f"dashboards/{file.name}" for file in (FOLDER / "dashboards").iterdir()} == made


def test_prometheus_reads_the_rules_and_the_operator_gets_the_same() -> None:
    assert "SUCCESS" in promtool("check", "rules", "rules.yml")
    plain = yaml.safe_load((FOLDER / "rules.yml").read_text("utf-8"))
    custom = yaml.safe_load((FOLDER / "prometheusrule.yaml").read_text("utf-8"))
    assert custom["spec"] == plain


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules.test.yml")


@pytest.mark.parametrize("name", NAMES)
def test_an_alert_is_tested_both_ways(name: str) -> None:
    expected = [bool(case["exp_alerts"]) for case in CASES if case["alertname"] == name]
    assert set(expected) == {True, False}


def test_a_rule_that_is_broken_fails_its_tests(tmp_path: Path) -> None:
    tests = yaml.safe_load((FOLDER / "rules.test.yml").read_text("utf-8"))
    tests["tests"] = [test for test in tests["tests"] if "HeadraceQueueOld" in str(test)]
    (tmp_path / "rules.test.yml").write_text(yaml.safe_dump(tests), "utf-8")
    text = (FOLDER / "rules.yml").read_text("utf-8")
    broken = text.replace("headrace_queue_oldest_seconds) > 30", "headrace_queue_oldest_seconds) > 3000")
    (tmp_path / "rules.yml").write_text(broken, "utf-8")
    said = subprocess.run(
        [program("promtool", "apt-get install prometheus"), "test", "rules", "rules.test.yml"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert said.returncode != 0 and "HeadraceQueueOld" in said.stdout + said.stderr


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['labels'].get('window', '')}")
def test_an_alert_says_what_it_is_and_where_to_read_on(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["summary"]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text("utf-8"), re.M)
    assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_what_counts_as_a_fault_is_what_the_errors_say() -> None:
    faults = set(rules.FAULTS.split("|"))
    assert faults <= BY_CODE.keys()
    assert {"engine_error", "no_capacity", "broker_down", "log_lost"} <= faults
    assert not faults & {"queue_full", "invalid_request", "cancelled", "model_not_found", "config_error"}


@pytest.mark.parametrize("place", ["observability", "compose"])
def test_prometheus_reads_its_configuration(place: str, tmp_path: Path) -> None:
    config = yaml.safe_load((INFRA / place / "prometheus.yml").read_text("utf-8"))
    config["rule_files"] = [str(FOLDER / "rules.yml")]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), "utf-8")
    assert "SUCCESS" in promtool("check", "config", tmp_path / "prometheus.yml")
    relabels = [job["relabel_configs"] for job in configured([])["scrape_configs"]]
    assert [job["relabel_configs"] for job in config["scrape_configs"]] == relabels
