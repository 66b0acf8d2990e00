"""`headrace redis-acl` and `headrace redis-functions`: what an operator brings to a Redis server of their own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.broker import acl, functions, scripts
from headrace.broker.errors import ConfigError
from headrace.broker.nodes import Nodes
from headrace.broker.redis_errors import broker_errors
from headrace.cli import options

_ENVIRONMENT = "HEADRACE_REDIS_PASSWORD_"
_MIN_LENGTH = 16


class Form(StrEnum):
    """How the rules are written."""

    FILE = "file"
    RULES = "rules"


def acl_command(
    config: options.Config = None,
    users: Annotated[
        str, typer.Option(help="Which users, by commas; a server with a replica also needs `replica`.")
    ] = "gateway,worker,scaler,ops,loader",
    passwords: Annotated[
        Path | None, typer.Option(help="A file of lines `user=password`; a user may have two, one in each line.")
    ] = None,
    form: Annotated[
        Form, typer.Option(help="`file`: an ACL file. `rules`: JSON of each user's rules, for a provider's server.")
    ] = Form.FILE,
    apply: Annotated[
        bool, typer.Option("--apply", help="Set the users on the servers of redis.url, and bring the functions.")
    ] = False,
) -> None:
    """Print the ACL users of pods, workers, autoscalers and operators, with hashed passwords.

    Passwords are those of the file, else of HEADRACE_REDIS_PASSWORD_<USER>, else made now and shown once, on stderr.
    """
    names = users.split(",")
    unknown = sorted(set(names) - acl.USERS.keys())
    if unknown:
        raise ConfigError(f"--users: {unknown[0]!r} is none of {', '.join(acl.USERS)}")
    if form is Form.RULES:
        typer.echo(json.dumps({name: " ".join(["on", *acl.rules(name, is_managed=True)]) for name in names}, indent=2))
        return
    known = _passwords(names, passwords, os.environ)
    if apply:
        asyncio.run(_apply(config, known))
    else:
        typer.echo("\n".join(acl.lines(known)))


def functions_command(
    config: options.Config = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete those of all other versions: no pod or worker of these may run.")
    ] = False,
) -> None:
    """Bring this version's functions to the servers of redis.url, as a user who may (`loader`, `ops`). Repeatable."""
    forgotten = asyncio.run(_bring(config, prune=prune))
    typer.echo(f"{scripts.library_name()} is there" + "".join(f", {name} is deleted" for name in forgotten))


def _passwords(names: list[str], file: Path | None, env: Mapping[str, str]) -> dict[str, list[str]]:
    """Of each user; those that are made here are shown."""
    given = _read(file) if file else {}
    unknown = sorted(given.keys() - acl.USERS.keys())
    if unknown:
        raise ConfigError(f"{file}: {unknown[0]!r} is no user; there are: {', '.join(acl.USERS)}")
    known = {}
    for name in names:
        from_env = env.get(f"{_ENVIRONMENT}{name.upper()}")
        known[name] = given.get(name) or ([from_env] if from_env else [])
        if not known[name]:
            known[name] = [acl.new_password()]
            typer.echo(f"{name}={known[name][0]}", err=True)
        if min(map(len, known[name])) < _MIN_LENGTH:
            raise ConfigError(f"the password of {name} must have at least {_MIN_LENGTH} characters")
    return known


def _read(file: Path) -> dict[str, list[str]]:
    try:
        lines = file.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        name, is_there, password = line.strip().partition("=")
        if is_there:
            found.setdefault(name.strip(), []).append(password.strip())
        elif name and not name.startswith("#"):
            raise ConfigError(f"{file}: line {number} is not like user=password")  # which it may be a part of
    return found


async def _apply(config: Path | None, known: Mapping[str, list[str]]) -> None:
    nodes = _nodes(config)
    try:
        for node in await nodes.all():
            with broker_errors():
                for name, passwords in known.items():
                    words = ["reset", "on", *map(acl.hashed, passwords), *acl.rules(name)]
                    await node.redis.execute_command("ACL SETUSER", name, *words)
                await functions.bring(node.redis)
                await _save(node.redis)
    finally:
        await nodes.close()
    typer.echo(f"set: {', '.join(known)}; {scripts.library_name()} is there")


async def _save(redis: Any) -> None:
    """So that a restart of the server keeps the users, if it has a file for them."""
    file = await redis.config_get("aclfile")
    if any(file.values()):
        await redis.acl_save()
    else:
        typer.echo("this server has no aclfile: it forgets its users at its next start", err=True)
    if "nopass" in (await redis.acl_getuser("default"))["flags"]:
        typer.echo(
            "the user `default` lets everybody in: ACL SETUSER default off, when all log in as their users", err=True
        )


async def _bring(config: Path | None, *, prune: bool) -> list[str]:
    nodes, forgotten = _nodes(config), set[str]()
    try:
        for node in await nodes.all():
            with broker_errors():
                await functions.bring(node.redis)
                if prune:
                    forgotten |= set(await functions.forget_others(node.redis))
    finally:
        await nodes.close()
    return sorted(forgotten)


def _nodes(config: Path | None) -> Nodes:
    settings = options.read(config)
    if settings.redis.url is None:
        raise ConfigError("redis.url: None is the embedded server, which has its users and functions by itself")
    return Nodes(settings.redis.url, settings.redis)
