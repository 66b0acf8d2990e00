"""JSON that fits a schema, made up but always the same: what the scripted engine says where JSON is asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from headrace.broker.errors import BadRequest

MAX_DEPTH = 32

_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
_ROOT = {"$schema", "$id", "$defs", "definitions", "$comment"}
_BY_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength"},
    "integer": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "boolean": set(),
    "null": set(),
}


def fitting(schema: dict[str, Any], word: Callable[[int], int], param: str) -> str:
    """Compact JSON text by this schema, in ASCII; `word` gives 32 bits for each place in it.

    Every property is there, arrays are as short as they may be, and of alternatives the first is taken. Raises
    BadRequest, with `param`, for a keyword that it does not know how to fit.
    """
    return json.dumps(_Maker(schema, word, param).value(schema, 0), separators=(",", ":"))


class _Maker:
    def __init__(self, root: dict[str, Any], word: Callable[[int], int], param: str) -> None:
        self._root = root
        self._word = word
        self._param = param
        self._places = 0

    def value(self, schema: Any, depth: int) -> Any:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict) or depth > MAX_DEPTH:
            raise self._refusal("a schema that is no object, or too deep")
        if "const" in schema:
            return schema["const"]
        if enum := schema.get("enum"):
            return enum[self._next() % len(enum)]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(found := schema.get(keyword), list) and found:
                return self.value(found[0], depth + 1)
        if "$ref" in schema:
            return self.value(self._target(schema["$ref"]), depth + 1)
        kind = self._kind(schema)
        if unknown := schema.keys() - _ANNOTATIONS - _ROOT - {"type"} - _BY_TYPE[kind]:
            raise self._refusal(f"`{min(unknown)}`")
        return self._plain(kind, schema, depth)

    def _kind(self, schema: dict[str, Any]) -> str:
        kind = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else "string")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if not isinstance(kind, str) or kind not in _BY_TYPE:
            raise self._refusal(f"type {kind!r}")
        return kind

    def _plain(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                properties = dict.fromkeys(schema.get("required", []), True) | schema.get("properties", {})
                return {name: self.value(each, depth + 1) for name, each in properties.items()}
            case "array":
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(schema.get("minItems", 0))]
            case "string":
                text = f"{self._next():08x}".ljust(schema.get("minLength", 0), "x")
                return text[: schema.get("maxLength", len(text))]
            case "boolean":
                return bool(self._next() % 2)
            case "null":
                return None
        return self._number(kind, schema)

    def _number(self, kind: str, schema: dict[str, Any]) -> int | float:
        low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
        high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
        if low == -math.inf:
            low = min(0, high - 100)
        if high == math.inf:
            high = low + 100
        first = math.floor(low) + 1 if low == schema.get("exclusiveMinimum") else math.ceil(low)
        last = math.ceil(high) - 1 if high == schema.get("exclusiveMaximum") else math.floor(high)
        if first <= last:
            return int(first + self._next() % (last - first + 1))
        if kind == "integer" or low >= high:
            raise self._refusal("bounds that no number fits")
        return (float(low) + float(high)) / 2

    def _target(self, reference: Any) -> Any:
        found: Any = self._root
        try:
            if not reference.startswith("#"):
                raise KeyError(reference)
            for name in reference.removeprefix("#").split("/")[1:]:
                found = found[name.replace("~1", "/").replace("~0", "~")]
        except (KeyError, TypeError, AttributeError) as error:
            raise self._refusal(f"the reference {reference!r}") from error
        return found

    def _next(self) -> int:
        self._places += 1
        return self._word(self._places - 1)

    def _refusal(self, what: str) -> BadRequest:
        return BadRequest(f"the scripted engine cannot fit this schema: {what}", param=self._param)
