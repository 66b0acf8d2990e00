"""Each query of each dashboard is one that Prometheus reads, and shows something while there is something to see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.infra.tools import INFRA, ROOT
from tests.observability.watched import FOLDER, MODEL, Watched
from tests.system.conftest import until

BOARDS: dict[str, dict[str, Any]] = {
    file.stem: json.loads(file.read_text("utf-8")) for file in sorted((FOLDER / "dashboards").glob("*.json"))
}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels", [])
        else:
            yield panel


QUERIES = [
    pytest.param(target["expr"], id=f"{name}-{panel['title']}-{target['refId']}")
    for name, board in BOARDS.items()
    for panel in panels(board)
    for target in panel["targets"]
]


@pytest.fixture(scope="module", autouse=True)
def after_a_loss(watched: Watched) -> None:
    """Panels of failovers have something to show only after one."""
    if not watched.has_lost:
        watched.kill_a_replica()


@pytest.mark.parametrize("expr", QUERIES)
def test_a_query_has_data_under_load(watched: Watched, expr: str) -> None:
    asked = expr.replace("$__rate_interval", "1m").replace("$model", MODEL)
    assert "$" not in asked
    until(lambda: watched.prometheus.query(asked), 20)


@pytest.mark.parametrize("name", BOARDS)
def test_a_dashboard_is_whole(watched: Watched, name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name and board["title"] and board["description"]
    shown = list(panels(board))
    assert len({panel["title"] for panel in shown}) == len(shown) > 5
    assert {panel["datasource"]["uid"] for panel in shown} == {"${datasource}"}
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in shown)
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"])
            assert asked is not None
            found = watched.prometheus.query(f"count by ({asked[2]}) ({asked[1]})")
            assert [dict(key)[asked[2]] for key in found] == [MODEL]


def test_compose_and_kubernetes_show_all_of_them() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    mounts = [volume.split(":")[0] for volume in compose["services"]["grafana"]["volumes"]]
    assert "./infra/observability/dashboards" in mounts
    provider = yaml.safe_load((INFRA / "compose" / "grafana" / "dashboards" / "headrace.yaml").read_text("utf-8"))
    assert provider["providers"][0]["options"]["path"] in str(compose["services"]["grafana"]["volumes"])
    rules = [volume for volume in compose["services"]["prometheus"]["volumes"] if "rules.yml" in volume]
    assert rules and rules[0].split(":")[1] in (INFRA / "compose" / "prometheus.yml").read_text("utf-8")
    component = yaml.safe_load((FOLDER / "kustomization.yaml").read_text("utf-8"))
    assert component["configMapGenerator"][0]["files"] == sorted(
        (f"dashboards/{name}.json" for name in BOARDS), key=component["configMapGenerator"][0]["files"].index
    )
    assert {"prometheusrule.yaml", "scrape.yaml"} <= set(component["resources"])
