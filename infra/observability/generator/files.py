"""Every file that is made, by its path from `infra/observability`."""

from __future__ import annotations

import yaml

from infra.observability.generator import autoscaling, model, overview, relay, rules
from infra.observability.generator.panels import as_json

_HEADER = "# Made by `make dashboards` of generator/rules.py.\n"


def files() -> dict[str, str]:
    """Path and text."""
    plain, custom = {"groups": rules.groups()}, rules.prometheus_rule()
    boards = [overview.dashboard(), model.dashboard(), autoscaling.dashboard(), relay.dashboard()]
    return {
        "rules.yml": _HEADER + _yaml(plain),
        "prometheusrule.yaml": _HEADER + _yaml(custom),
        **{f"dashboards/{board.uid}.json": as_json(board) for board in boards},
    }


def _yaml(content: object) -> str:
    text: str = yaml.safe_dump(content, sort_keys=False, width=100_000, allow_unicode=True)
    return text
