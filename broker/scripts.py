"""The verbs' Lua files, as one library of functions: the key names of `keys.py`, the shared functions, the verbs.

Functions and not scripts: the server keeps them with its data and gives them to its replicas, so that who calls them
needs no right to bring code. The library is named after what is in it, so that two versions can stand side by side.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files

from headrace.broker import keys

VERBS = (
    "admit", "claim", "tick", "settle", "release", "cancel", "watch", "unwatch", "reap", "stats", "status", "present",
    "dead", "expire", "forget",
)  # fmt: skip

PREFIX = "hr_"
"""Of the names of all libraries of ours, of every version."""


_PROBE = """redis.register_function{
  function_name = '%LIBRARY%_is_there', flags = { 'no-writes' }, callback = function() return 1 end
}"""
"""Without a key, so that every server of a cluster answers it, also one that takes no writes now."""


@cache
def source(verb: str) -> str:
    """The file of a verb, or of what they share (`lib`), as it stands in the package."""
    return (files("headrace.broker") / "lua" / f"{verb}.lua").read_text("utf-8")


@cache
def library() -> str:
    """All of it, as the server is given it."""
    return f"#!lua name={library_name()}\n{_content().replace('%LIBRARY%', library_name())}"


@cache
def library_name() -> str:
    return PREFIX + hashlib.sha256(_content().encode()).hexdigest()[:12]


@cache
def function(verb: str) -> str:
    """What the server calls a verb."""
    return f"{library_name()}_{verb}"


@cache
def _content() -> str:
    return "\n".join([_PROBE, keys.lua_table(), source("lib"), *(_registration(verb) for verb in VERBS)])


def _registration(verb: str) -> str:
    """A file's first line says the flags of its function, as `#!lua flags=...` does for scripts."""
    shebang, _, body = source(verb).partition("\n")
    flags = re.fullmatch(r"#!lua(?: flags=([a-z,-]+))?", shebang)
    assert flags is not None, shebang
    quoted = ", ".join(f"'{flag}'" for flag in (flags[1] or "").split(",") if flag)
    head = f"redis.register_function{{ function_name = '%LIBRARY%_{verb}', flags = {{ {quoted} }}"
    return f"{head}, callback = function(KEYS, ARGV)\nat(KEYS[1])\n{body}\nend }}"
