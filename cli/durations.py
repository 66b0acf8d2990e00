"""How long, as people write it."""

from __future__ import annotations

import re

from headrace.broker.errors import BadRequest

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([0-9]{1,6})([smhd])")


def seconds(text: str) -> int:
    """`90d`, `12h`, `30m` or `10s`; raises BadRequest."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise BadRequest(f"{text[:64]!r} is no time: say it like 90d, 12h, 30m or 10s")
    return int(found[1]) * _UNITS_S[found[2]]
