"""JSON by a schema, from 32 bits a place."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.errors import BadRequest
from headrace.workers.engines.scripted_json import fitting


def made(schema: dict[str, Any], salt: int = 0) -> Any:
    return json.loads(fitting(schema, lambda place: zlib.crc32(b"%d|%d" % (salt, place)), "response_format"))


@pytest.mark.parametrize("salt", range(5))
def test_every_kind_of_value_fits(salt: int) -> None:
    value = made(
        {
            "$defs": {"tag": {"enum": ["a", "b"]}},
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 10, "maxLength": 12, "description": "the name"},
                "short": {"type": "string", "maxLength": 3},
                "count": {"type": "integer", "minimum": 3, "exclusiveMaximum": 5},
                "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                "below": {"type": "integer", "maximum": -7},
                "yes": {"type": "boolean"},
                "nothing": {"type": ["null", "string"]},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 2},
                "either": {"anyOf": [{"const": 7}, {"type": "string"}]},
                "free": {},
            },
            "required": ["name", "extra"],
            "additionalProperties": False,
        },
        salt,
    )
    assert 10 <= len(value["name"]) <= 12
    assert len(value["short"]) == 3
    assert value["count"] in (3, 4)
    assert 0 < value["share"] < 1
    assert value["below"] <= -7
    assert isinstance(value["yes"], bool)
    assert (value["nothing"], value["either"]) == (None, 7)
    assert len(value["tags"]) == 2
    assert set(value["tags"]) <= {"a", "b"}
    assert {"free", "extra"} <= value.keys()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "x"},
        {"type": "thing"},
        {"type": []},
        {"$ref": "#/$defs/none"},
        {"$ref": "http://elsewhere"},
        {"$ref": "#"},
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"not": {}},
        {"type": "array", "minItems": 1, "items": False},
    ],
)
def test_what_it_cannot_fit_it_refuses(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as raised:
        made(schema)
    assert raised.value.param == "response_format"


@given(st.integers(-(10**6), 10**6), st.integers(0, 10**6), st.integers(0, 2**32 - 1))
def test_whole_numbers_keep_their_bounds(low: int, span: int, salt: int) -> None:
    for schema in ({"minimum": low, "maximum": low + span}, {"exclusiveMinimum": low - 1, "maximum": low + span}):
        assert low <= made({"type": "integer", **schema}, salt) <= low + span
