"""What an answer may be bound to: large and deep enough for people, not for bombs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headrace.api.wire import bounds
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Constraint, Grammar, Job, JsonObject, JsonSchema, Regex, Text, Tool
from headrace.broker.settings import ApiSettings
from tests.api.conftest import Deploy
from tests.api.undisturbed import undisturbed

LIMITS = ApiSettings()


def check(constraint: Constraint | None = None, tools: Sequence[dict[str, Any]] = ()) -> None:
    named = [Tool(f"t{number}", "", each) for number, each in enumerate(tools)]
    bounds.check(Job("", "m", Text("hi"), constraint=constraint, tools=named), LIMITS)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


USUAL = {
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[A-Z][a-z]{1,40}( [A-Z][a-z]{1,40}){0,3}$", "maxLength": 200},
        "maxLength": {"type": "integer", "minimum": -1e300, "maximum": 10**15},
        "pattern": {"type": "object", "properties": {"pattern": {"const": "("}}},
        "kind": {"enum": [f"kind {index}" for index in range(3000)]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 1, "maxItems": 1000},
        "mail": {"type": "string", "pattern": r"^[^@\s]{1,64}@([a-z0-9-]{1,63}\.){1,8}[a-z]{2,24}$"},
    },
    "patternProperties": {"^x-[a-z]{1,30}$": {"type": "string"}},
}


def test_usual_ones_pass() -> None:
    check(None)
    check(JsonObject())
    check(Grammar("root ::= [a-z]+"))
    for schema in ({}, USUAL, deep(60)):
        check(JsonSchema(schema))
    for pattern in (
        "",
        "a",
        r"\d{4}-\d{2}-\d{2}",
        "(yes|no)",
        "[]a]{3}",
        r"[\]]{2}\(",
        "(?:a{10}){10}",
        "a{",
        "x{,5}",
    ):
        check(Regex(pattern))
    check(tools=[USUAL] * 4)


SCHEMAS: dict[str, dict[str, Any]] = {
    "deep": deep(70),
    "deep in lists": {"anyOf": [deep(64)]},
    "values": {"enum": list(range(20_001))},
    "properties": {"properties": {f"p{index}": {} for index in range(20_001)}},
    "text": {"enum": ["a" * 100_000] * 6},
    "names": {"properties": {"a" * 100_000 + str(index): {} for index in range(6)}},
    "maxLength": {"type": "string", "maxLength": 10**9},
    "minItems": {"type": "array", "minItems": 10**18},
    "minLength": {"properties": {"a": {"items": {"minLength": 65_537}}}},
    "minProperties": {"minProperties": 1e9},
    "pattern": {"type": "string", "pattern": "(a{1000}){1000}"},
    "patterns of names": {"patternProperties": {"((a{100}){100}){100}": {}}},
    "a reference to elsewhere": {"$ref": "http://127.0.0.1:6379/x"},
    "a reference to a file": {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_are_bombs_are_refused(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check(JsonSchema(SCHEMAS[name]))
    assert caught.value.param == "response_format"
    with pytest.raises(BadRequest) as caught:
        check(tools=[{}, SCHEMAS[name]])
    assert caught.value.param == "tools"


def test_the_schemas_of_all_tools_count_together() -> None:
    check(tools=[{"enum": list(range(9000))}] * 2)
    with pytest.raises(BadRequest):
        check(tools=[{"enum": list(range(9000))}] * 3)
    with pytest.raises(BadRequest):
        check(tools=[{}] * 1025)


@pytest.mark.parametrize(
    "pattern",
    [
        "a" * 4097,
        "(" * 33 + "a" + ")" * 33,
        "a{20001}",
        "a{2,20001}",
        "a{20001,}",
        "(a{1000}){1000}",
        "(?:(?:a{50}){50}){50}",
        "([a-z]{200}|b{3}){200}",
        "[" + "a" * 50 + "]{99999}",
        "a{99999999999999999999999}",
        r"(\(){99999}",
        "((((a{9}){9}){9}){9}){9}",
    ],
)
def test_patterns_that_are_bombs_are_refused(pattern: str) -> None:
    with pytest.raises(BadRequest):
        check(Regex(pattern))


def test_grammars_have_a_length() -> None:
    check(Grammar("a" * 65_536))
    check(Grammar("root ::= " + " | ".join(f'"{index}?*+|"' for index in range(500)) + " [a?*|]* # |||" + "|" * 600))
    for bomb in ("root ::= " + " | ".join("a" * 600), "root ::= " + '"a"? ' * 65, 'root ::= "a"{0,9}' * 65):
        with pytest.raises(BadRequest):
            check(Grammar(bomb))
    with pytest.raises(BadRequest):
        check(Grammar("a" * 65_537))


async def test_a_bomb_is_refused_in_each_formats_own_words(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    bomb = SCHEMAS["maxLength"]
    turns = [{"role": "user", "content": "hi"}]
    chat = {"model": "scripted", "messages": turns}
    form = {"type": "json_schema", "schema": bomb}
    answers = {
        "/v1/chat/completions": {**chat, "response_format": {"type": "json_schema", "json_schema": {"schema": bomb}}},
        "/v1/responses": {
            "model": "scripted",
            "input": "hi",
            "text": {"format": form},
        },
        "/v1/messages": {**chat, "max_tokens": 1, "output_config": {"format": form}},
        "/api/chat": {**chat, "format": bomb},
        "/completion": {"prompt": "hi", "json_schema": bomb},
        "/generate": {"inputs": "hi", "parameters": {"grammar": {"type": "regex", "value": "(a{1000}){1000}"}}},
    }
    async with undisturbed(up):
        for path, body in answers.items():
            answer = await up.ask("POST", path, json=body)
            assert answer.status == (422 if path == "/generate" else 400), path
            assert "at most" in answer.body.decode()
        said = await up.ask("POST", "/v1/responses", json=answers["/v1/responses"])
        assert said.error["param"] == "text.format"
