"""The tables of docs/api.md are true: what they say is refused is, by its name, and a hint changes nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.api.openapi import BODIES
from headrace.api.wire import BY_NAME, tgi
from headrace.api.wire.format import Format, Parsed
from headrace.api.wire.ollama_request import Options
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Job
from headrace.broker.settings import ApiSettings
from tests.api.bodies import VALID

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
PATHS = {
    "OpenAI chat completions": "/v1/chat/completions",
    "OpenAI completions": "/v1/completions",
    "OpenAI Responses": "/v1/responses",
    "Anthropic Messages": "/v1/messages",
    "Ollama": "/api/generate",
    "llama.cpp": "/completion",
    "TGI": "/generate",
}
VALUES: tuple[Any, ...] = (True, 2, 0.5, "x", ["x"], {"type": "x"}, [[1, 2]], [{"a": 1}])
"""What a field is tried with; `PASSED` are those that change nothing, or are the case that the row does not mean."""
PASSED: dict[str, tuple[Any, ...]] = {"best_of": (True,), "length_penalty": (True,), "prompt": ("x", ["x"], [[1, 2]])}
SPECIAL: dict[tuple[str, str], Any] = {
    ("Anthropic Messages", "service_tier"): "auto",
    ("OpenAI Responses", "include"): ["message.output_text.logprobs"],
}
WORDS = {"medium", "disabled", "auto", "standard_only", "text", "json", "false", "true"}
"""What stands in a left cell and is no field."""
OUTSIDE = {
    "TGI": {"inputs"},
    "Ollama": {
        "images",
        "template",
        "context",
        "truncate",
        "shift",
        "format",
        "think",
        "tools",
        "logprobs",
        "top_logprobs",
    },
}
INSIDE = {"TGI": "parameters", "Ollama": "options"}
FIELD = re.compile(r"`([a-z_]+(?:\.[a-z_]+)?)`")


def cells(kind: str) -> list[Any]:
    """The fields of the rows whose right cell begins so, each with its section."""
    found = []
    for part in PAGE.split("\n## ")[1:]:
        section = part.partition("\n")[0]
        rows = re.findall(r"^\| (.*?) \| (.*?) \|$", part, re.MULTILINE) if section in PATHS else []
        for left, _ in (row for row in rows if re.match(kind, row[1])):
            names = [name for name in FIELD.findall(left) if name not in WORDS]
            found += [pytest.param(section, name, id=f"{section}-{name}") for name in names]
    return found


def parse(section: str, field: str, value: Any) -> Parsed:
    path = PATHS[section]
    form: Format = BY_NAME[str(BODIES[path].format)]
    within, _, name = field.rpartition(".")
    if not within and name not in OUTSIDE.get(section, ()):
        within = INSIDE.get(section, "")
    streams = {"stream": True} if within == "stream_options" else {}
    body = {**VALID[path], **streams, **({within: {name: value}} if within else {name: value})}
    return form.parse(msgspec.json.encode(body), ApiSettings())


def outcomes(section: str, field: str) -> list[str | Job | None]:
    """For each value, the job, or what the refusal names."""
    found: list[str | Job | None] = []
    for value in (SPECIAL[section, field],) if (section, field) in SPECIAL else VALUES:
        try:
            found.append(parse(section, field, value).job)
        except BadRequest as error:
            found.append(error.param)
    return found


def plain_job(section: str) -> Job:
    path = PATHS[section]
    return BY_NAME[str(BODIES[path].format)].parse(msgspec.json.encode(VALID[path]), ApiSettings()).job


@pytest.mark.parametrize(("section", "field"), cells(r"4(00|22)\b"))
def test_what_is_refused_is_refused_by_its_name(section: str, field: str) -> None:
    for value, name in zip(VALUES, outcomes(section, field), strict=True):
        if isinstance(name, Job):
            assert value in PASSED.get(field, ()), value
        else:
            assert name and (name.startswith(field.partition(".")[0]) or name.endswith(field)), name


@pytest.mark.parametrize(("section", "field"), cells(r"hints?\b"))
def test_a_hint_is_taken_and_changes_nothing(section: str, field: str) -> None:
    jobs = [each for each in outcomes(section, field) if isinstance(each, Job)]
    assert jobs
    assert all(job == plain_job(section) for job in jobs)


def fields() -> list[Any]:
    """Of the rows that say yes, what is a field of the body; the others are values, or of answers."""
    types: dict[str, tuple[type[msgspec.Struct], ...]] = {"TGI": (tgi.Parameters,), "Ollama": (Options,)}
    of = {section: (*types.get(section, ()), BODIES[path].type) for section, path in PATHS.items()}
    names = {section: {name for kind in kinds for name in kind.__struct_fields__} for section, kinds in of.items()}
    return [cell for cell in cells(r"yes\b") if cell.values[1] in names[str(cell.values[0])]]


@pytest.mark.parametrize(("section", "field"), fields())
def test_what_is_supported_is_read(section: str, field: str) -> None:
    """Of one value at least it makes another job, or it refuses one, by its name."""
    said = outcomes(section, field)
    assert any(each != plain_job(section) for each in said), said
