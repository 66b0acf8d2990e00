"""`/openapi.json`: it validates, and says what there is."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from openapi_spec_validator import OpenAPIV31SpecValidator

from headrace.api import openapi
from headrace.api.app import create_app
from headrace.api.wire import BY_NAME
from headrace.broker.errors import HeadraceError
from headrace.broker.memory import MemoryBroker
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import ApiSettings, Settings
from tests.api.bodies import VALID
from tests.api.conftest import Deploy

ROOT = Path(__file__).parents[2]
SETTINGS = Settings([ScriptedModel(name="m")])


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return create_app(SETTINGS, MemoryBroker(SETTINGS.queue))


@pytest.fixture(scope="module")
def document(app: FastAPI) -> dict[str, Any]:
    read: dict[str, Any] = msgspec.json.decode(openapi.document(app))
    return read


def test_it_validates(document: dict[str, Any]) -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []


def test_it_has_every_route_and_no_other(app: FastAPI, document: dict[str, Any]) -> None:
    def of(paths: dict[str, Any]) -> set[tuple[str, str]]:
        return {(path, method) for path, methods in paths.items() for method in methods}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of routes with two methods
        theirs = get_openapi(title="", version="", routes=app.routes)
    said = of(document["paths"])
    assert said == of(theirs["paths"])
    assert {("/v1/chat/completions", "post"), ("/api/tags", "head"), ("/openapi.json", "get")} <= said


def test_every_route_that_reads_a_body_says_which(document: dict[str, Any]) -> None:
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    without = {"/v1/responses/{response}/cancel", "/api/blobs/{digest}"}
    without |= {f"/api/{verb}" for verb in ("pull", "push", "create", "copy")}
    assert posts - without == set(openapi.BODIES)
    assert {path for path in posts if "requestBody" in document["paths"][path]["post"]} == set(openapi.BODIES)


@pytest.mark.parametrize("path", [path for path, body in openapi.BODIES.items() if body.format])
def test_what_it_takes_the_route_takes_and_what_it_refuses_the_route_refuses(
    document: dict[str, Any], path: str
) -> None:
    """A body of the schema's required fields and no other; then one without each of them, and with a wrong type."""
    body = openapi.BODIES[path]
    assert body.format
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    judge = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
    form = BY_NAME[body.format]
    valid = {**VALID[path]}
    judge.validate(valid)
    form.parse(msgspec.json.encode(valid), ApiSettings())
    properties = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    for name in properties["required"]:
        bad = {key: value for key, value in valid.items() if key != name}
        assert not judge.is_valid(bad)
        with pytest.raises(HeadraceError):
            form.parse(msgspec.json.encode(bad), ApiSettings())
    for name, kind in properties["properties"].items():
        if kind.get("type") != "array" and kind.keys() - {"default"}:
            bad = {**valid, name: [[1]]}
            if judge.is_valid(bad):
                continue
            with pytest.raises(HeadraceError):
                form.parse(msgspec.json.encode(bad), ApiSettings())


def test_errors_are_shown_in_each_familys_form(document: dict[str, Any]) -> None:
    def example(path: str) -> Any:
        return document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["example"]

    assert example("/v1/chat/completions")["error"]["param"] == "temperature"
    assert example("/api/chat").keys() == {"error"} and isinstance(example("/api/chat")["error"], str)
    assert example("/v1/messages")["type"] == "error"


def test_it_has_every_header_that_is_read_and_so_has_the_page(document: dict[str, Any]) -> None:
    source = (ROOT / "api" / "requests.py").read_text("utf-8")
    read = set(re.findall(r'headers\.get(?:list)?\("([a-z-]+)"', source)) - {"content-length", "content-encoding"}
    said = {each["name"] for each in document["paths"]["/chat"]["post"]["parameters"] if each["in"] == "header"}
    assert {name.lower() for name in said} == read
    page = (ROOT / "docs" / "http.md").read_text("utf-8")
    assert {name for name in said if f"| `{name}: " not in page} == set()


async def test_a_pod_serves_it(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    answer = await up.ask("GET", "/openapi.json")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json["info"]["title"] == "headrace"
