"""The runbooks name only what there is: commands, settings, metrics, error codes, files."""

from __future__ import annotations

import re

import msgspec
import pytest
import typer
from prometheus_client import REGISTRY

from headrace.broker import metrics
from headrace.broker.errors import BY_CODE
from headrace.broker.settings import Settings
from headrace.cli.main import app
from tests.infra.tools import INFRA, ROOT

OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
QUOTED = re.findall(r"`([^`\n]+)`", OPERATIONS)


def _sections() -> dict[str, set[str]]:
    fields = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    return {name: set(kind.__struct_fields__) for name, kind in fields.items() if hasattr(kind, "__struct_fields__")}


def test_settings() -> None:
    sections = _sections()
    named = {
        tuple(found)
        for text in QUOTED
        for found in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", text)
        if found[0] in sections
    }
    assert len(named) > 8
    assert {f"{section}.{field}" for section, field in named if field not in sections[section]} <= {
        "api.py",
        "queue.max_waiting_",  # and what begins so
        "broker.node_type",  # Terraform's
        "ray.io",  # of names in Kubernetes
    }


def test_metrics() -> None:
    assert metrics.STREAMS_OPEN
    known = {sample for metric in REGISTRY.collect() for sample in (metric.name, f"{metric.name}_total")}
    named = {name for text in QUOTED for name in re.findall(r"\bheadrace_[a-z_]+\b", text)}
    assert len(named) > 4
    assert named - known == set()


def test_error_codes() -> None:
    codes = {text.split()[-1] for text in QUOTED if text.split()[-1] in BY_CODE}
    assert codes >= {"no_capacity", "broker_down", "broker_full", "queue_full", "owner_queue_full", "log_lost"}
    rows = re.findall(r"^\| (?:503|429) `([a-z_]+)`", OPERATIONS, re.M)
    assert len(rows) == 6 and set(rows) <= BY_CODE.keys()


@pytest.mark.parametrize("text", sorted({text for text in QUOTED if text.startswith("headrace ")}))
def test_commands(text: str) -> None:
    words = [word for word in text.split()[1:] if word[0] not in "-/"]
    command: object = typer.main.get_command(app)
    for word in words:
        below = getattr(command, "commands", None)
        if below is None:
            break  # its arguments
        assert word in below, text
        command = below[word]


def test_files() -> None:
    for path in re.findall(r"\b(?:infra|docs|tests|bench)/[\w./-]+\w", OPERATIONS):
        assert (ROOT / path).exists() or (INFRA / path.removeprefix("infra/")).exists(), path
    for link in re.findall(r"\]\(([^)]+)\)", OPERATIONS):
        target = ROOT / "docs" / link
        assert target.exists() or target.with_suffix(".md").exists(), link
