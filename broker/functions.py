"""The functions of this version on a server: found there, or brought there by who may.

What pods and workers log in as may call functions and not bring any (see `acl`): whoever has such a password can run
our code only. `headrace redis-functions`, as a user who may, brings them; so does the embedded server's start.
"""

from __future__ import annotations

import contextlib
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from headrace.broker import keys, scripts
from headrace.broker.errors import BrokerDown
from headrace.broker.nodes import Node

_RETRY_S = 1


async def call(node: Node, verb: str, shard: int, *args: str | bytes | float) -> Any:
    """Call a verb; if the server has lost it, which means that nothing was done, bring it and call once more."""
    command = ("FCALL", scripts.function(verb), 1, keys.base(shard), *args)
    try:
        return await node.calls.ask(*command)
    except ResponseError as error:
        if not is_missing(error):
            raise
    await bring(node.redis)
    return await node.calls.ask(*command)


async def bring(redis: Any) -> None:
    """See that the server has them; raises BrokerDown if it has not and this user may not bring them. Repeatable."""
    if await _are_there(redis):  # first: a server that takes no writes now takes no functions, and need not
        return
    try:
        await redis.execute_command("FUNCTION LOAD", scripts.library())
    except NoPermissionError as error:
        raise BrokerDown(
            f"the server has not the functions of this version ({scripts.library_name()}), and this user may not "
            "bring them: run `headrace redis-functions`",
            retry_after_s=_RETRY_S,
        ) from error
    except ResponseError as error:
        if "already exists" not in str(error):
            raise


async def _are_there(redis: Any) -> bool:
    try:
        await redis.execute_command("FCALL", scripts.function("is_there"), 0)
    except ResponseError as error:
        if is_missing(error):
            return False
        raise
    return True


async def forget_others(redis: Any) -> list[str]:
    """Delete the libraries of all other versions, which nobody may use any more; answers their names."""
    listed = await redis.execute_command("FUNCTION LIST", "LIBRARYNAME", f"{scripts.PREFIX}*")
    names = [text for row in listed if (text := _name_in(row)) != scripts.library_name()]
    for name in names:
        with contextlib.suppress(ResponseError):  # somebody else was faster
            await redis.execute_command("FUNCTION DELETE", name)
    return names


def _name_in(row: list[Any]) -> str:
    return str(dict(zip(row[::2], row[1::2], strict=True))[b"library_name"].decode())


def is_missing(error: Exception) -> bool:
    return "Function not found" in str(error)
