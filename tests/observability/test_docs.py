"""docs/observability.md names every metric, alert, recorded series and dashboard that there is, and no other."""

from __future__ import annotations

import re

from prometheus_client import Counter

from headrace.broker import metrics
from infra.observability.generator import rules
from tests.infra.tools import ROOT
from tests.observability.watched import FOLDER

PAGE = (ROOT / "docs" / "observability.md").read_text("utf-8")
METRICS: list[metrics.Metric] = [each for name, each in vars(metrics).items() if name.isupper() and name[0] != "_"]


def test_the_table_of_metrics_is_what_is_declared() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| ([\w, -]+) \| [\w, ]+ \| (.+) \|$", PAGE, re.M)
    assert [(name, kind, labels) for name, kind, labels, _ in rows] == [
        (
            each._name + "_total" * isinstance(each, Counter),
            type(each).__name__.lower(),
            ", ".join(each._labelnames) or "-",
        )
        for each in METRICS
    ]
    assert [text for *_, text in rows] == [" ".join(each._documentation.split()) for each in METRICS]


def test_every_metric_that_is_named_is_there() -> None:
    known = {each._name + "_total" * isinstance(each, Counter) for each in METRICS}
    named = set(re.findall(r"\b(?:headrace|gen_ai)_[a-z_]+\b", PAGE))
    assert named - known == set()


def test_every_alert_and_recorded_series_is_named() -> None:
    made = [rule for group in rules.groups() for rule in group["rules"]]
    alerts = {rule["alert"]: set[str]() for rule in made if "alert" in rule}
    for rule in made:
        if "alert" in rule:
            alerts[rule["alert"]].add(rule["labels"]["severity"])
    rows = dict(re.findall(r"^\| `(Headrace\w+)` \| ([\w, ]+) \|", PAGE, re.M))
    assert {name: set(severity.split(", ")) for name, severity in rows.items()} == alerts
    series = {rule["record"] for rule in made if "record" in rule}
    for name in series:
        assert f"`{name}`" in PAGE or f"`{re.sub('rate[0-9]+[mhd]$', 'rate*', name)}`" in PAGE, name


def test_every_dashboard_is_named() -> None:
    names = {"headrace-overview": "service overview", "headrace-model": "one model"}
    for file in (FOLDER / "dashboards").iterdir():
        name = names.get(file.stem, file.stem.removeprefix("headrace-"))
        assert re.search(rf"^\| {name}", PAGE, re.M), file.stem
