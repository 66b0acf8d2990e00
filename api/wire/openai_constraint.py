"""What an answer must look like: OpenAI's `response_format`, and the names that vLLM and llama-server have for it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from headrace.api.wire.bounds import schema_of
from headrace.broker.errors import BadRequest
from headrace.broker.messages import Constraint, Grammar, JsonObject, JsonSchema, Regex

_OTHERS = ("choice", "grammar", "structural_tag", "disable_fallback", "disable_any_whitespace", "whitespace_pattern")
"""Members of vLLM's `structured_outputs` that are not supported."""


class NamedSchema(Struct, frozen=True):
    """OpenAI's wrapping of a schema; what else stands in it (`name`, `strict`) does not change what is enforced."""

    schema: dict[str, Any] | None = None


class ResponseFormat(Struct, frozen=True):
    """`schema` beside the type is llama-server's way to say it."""

    type: str
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


class Constrained(Struct, frozen=True, kw_only=True):
    """All fields that constrain an answer; at most one of them may be given."""

    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


def constraint_of(request: Constrained) -> Constraint | None:
    """The one constraint of a request; raises BadRequest for two, and for one that cannot be read."""
    given: dict[str, Constraint | None] = {
        "response_format": of_format(request.response_format) if request.response_format else None,
        "guided_json": _schema(request.guided_json, "guided_json"),
        "guided_regex": Regex(request.guided_regex) if request.guided_regex else None,
        "structured_outputs": _structured(request.structured_outputs or {}),
        "json_schema": _schema(request.json_schema, "json_schema"),
        "grammar": Grammar(request.grammar) if request.grammar else None,
    }
    found = [(name, constraint) for name, constraint in given.items() if constraint is not None]
    if len(found) > 1:
        raise BadRequest(f"{found[1][0]} cannot be combined with {found[0][0]}.", param=found[1][0])
    return found[0][1] if found else None


def of_format(form: ResponseFormat, where: str = "response_format") -> Constraint | None:
    """`text`, `json_object` or `json_schema`; raises BadRequest for another, or if the schema is missing."""
    schema = form.json_schema.schema if form.json_schema else form.schema
    match form.type:
        case "text":
            return None
        case "json_object":
            return JsonObject() if schema is None else JsonSchema(schema)
        case "json_schema":
            if schema is None:
                inner = f"{where}.json_schema.schema"
                raise BadRequest(f"{inner} is missing.", param=inner)
            return JsonSchema(schema)
    raise BadRequest(f"{where}.type must be text, json_object or json_schema.", param=f"{where}.type")


def _schema(schema: object, where: str) -> JsonSchema | None:
    """A schema, or its JSON text, as vLLM takes it too."""
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = schema_of(schema, where)
    if not isinstance(schema, dict):
        raise BadRequest(f"{where} must be an object.", param=where)
    return JsonSchema(schema)


def _structured(given: dict[str, Any]) -> Constraint | None:
    said = {name: value for name, value in given.items() if value not in (None, False)}
    for name in said:
        if name in _OTHERS or name not in ("json", "regex", "json_object"):
            where = f"structured_outputs.{name}"
            raise BadRequest(f"{where} is not supported by this server.", param=where)
    if len(said) > 1:
        raise BadRequest("structured_outputs must say one thing.", param="structured_outputs")
    if "regex" in said:
        if not isinstance(said["regex"], str):
            raise BadRequest("structured_outputs.regex must be a string.", param="structured_outputs.regex")
        return Regex(said["regex"])
    return JsonObject() if "json_object" in said else _schema(said.get("json"), "structured_outputs.json")
