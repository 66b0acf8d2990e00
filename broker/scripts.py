"""The verbs' Lua files, each made whole: its first line, the key names of `keys.py`, the shared functions, itself."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from headrace.broker import keys

VERBS = (
    "admit", "claim", "tick", "settle", "release", "cancel", "watch", "unwatch", "reap", "stats", "status", "present",
    "dead", "expire", "forget",
)  # fmt: skip


@cache
def source(verb: str) -> str:
    """The script of a verb as the server is given it; its SHA-1 is its name there."""
    folder = files("headrace.broker") / "lua"
    shebang, _, body = (folder / f"{verb}.lua").read_text("utf-8").partition("\n")
    shared = (folder / "lib.lua").read_text("utf-8")
    return f"{shebang}\n{keys.lua_table()}\n{shared}\n{body}"
