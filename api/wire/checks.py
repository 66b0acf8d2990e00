"""Checks that several formats make on the way in: bounds, stop strings, fields that cannot be honoured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from headrace.broker.errors import BadRequest
from headrace.broker.settings import ApiSettings

INT64_MAX = 2**63 - 1
TOKEN_ID_MAX = 2**31 - 1
JSON_INT_MAX = 2**53
"""The highest whole number that every JSON reader takes as it is."""
MAX_BIASES = 1024

Range = tuple[str, float, float]
"""A field, and the lowest and highest value it may have."""


def in_ranges(request: Struct, ranges: Sequence[Range]) -> None:
    """Refuse a number outside of its bounds; NaN is outside of all. It is not repeated: it may have many digits."""
    for name, low, high in ranges:
        value = getattr(request, name)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be from {low} to {high}.", param=name)


def refuse(request: Struct, harmless: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that cannot be honoured; `harmless` names them all, and for each the values that ask for nothing.

    JSON's true is no 1 here, as it is in Python.
    """
    for name, values in harmless.items():
        given = getattr(request, name)
        if given is not None and not any(given == value and type(given) is type(value) for value in values):
            raise BadRequest(f"{name} is not supported by this server.", param=name)


def stops(given: str | list[str] | None, limits: ApiSettings) -> list[str]:
    """Stop strings, one or several; an empty one is refused, since it would stop at once."""
    found = [given] if isinstance(given, str) else given or []
    if len(found) > limits.max_stops:
        raise BadRequest(f"stop must have at most {limits.max_stops} strings.", param="stop")
    if not all(1 <= len(each) <= limits.max_stop_chars for each in found):
        raise BadRequest(f"A stop string must have from 1 to {limits.max_stop_chars} characters.", param="stop")
    return found


def token_ids(given: Sequence[int], param: str, highest: int = TOKEN_ID_MAX) -> list[int]:
    if not all(0 <= each <= highest for each in given):
        raise BadRequest(f"The token ids of {param} must be from 0 to {highest}.", param=param)
    return list(given)
