"""What each verb's Lua does, read from its text: which commands it calls and which kinds of keys it names.

It follows calls from a verb into the shared functions, and believes the heads of the files where a name is made up at
run time. What it finds is what could happen, in some call: never less than what does.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from headrace.broker import keys, scripts


class Use(NamedTuple):
    """Commands in lower case, and kinds of `keys.KEYS`."""

    commands: frozenset[str]
    kinds: frozenset[str]


@cache
def of_verb(verb: str) -> Use:
    text = scripts.source(verb)
    code = "\n".join([_code(text), *_reached(_code(text), set())])
    calls = re.findall(r"redis\.call\('(\w+)'", code)
    assert len(re.findall(r"redis\.p?call\(", code)) == len(calls), "a command that is not named where it is called"
    kinds = set(re.findall(r"\bK\.(\w+)", code))
    if "K[" in code:  # then the head of the file says which
        named = re.search(r"^-- Reads.*?(?=^-- ARGV)", text, re.M | re.S)
        kinds |= set(re.findall(r"[a-z]+", named[0] if named else "")) & keys.KEYS.keys()
    return Use(frozenset(map(str.lower, calls)), frozenset(kinds - {"base"}))


@cache
def _shared() -> dict[str, str]:
    """The bodies of the functions that all verbs share, by name."""
    code = _code(scripts.source("lib"))
    return dict(re.findall(r"^local function (\w+)\((.*?)^end$", code, re.M | re.S))


def _code(text: str) -> str:
    return re.sub(r"--.*", "", text)


_READING = {
    "exists", "get", "hget", "hgetall", "hmget", "pttl", "scard", "smembers", "xrange", "xrevrange", "zcard",
    "zcount", "zrange", "zrangebyscore", "zrank", "zrevrange", "zscore",
}  # fmt: skip


@cache
def written_by(verb: str) -> frozenset[str]:
    """Kinds whose name stands in the call of a command that writes, in the verb's own file or what it calls."""
    code = [_code(scripts.source(verb)), *_reached(_code(scripts.source(verb)), set())]
    calls = re.findall(r"redis\.call\('(\w+)', \(?K\.(\w+)", "\n".join(code))
    return frozenset(kind for command, kind in calls if command.lower() not in _READING)


def _reached(code: str, seen: set[str]) -> list[str]:
    found = []
    for name, body in _shared().items():
        if name not in seen and re.search(rf"\b{name}\(", code):
            seen.add(name)
            found += [body, *_reached(body, seen)]
    return found
