"""What our own Redis connections share: a command in bytes, and a connection of redis-py's that we hear ourselves.

redis-py makes it (TLS, login, timeouts); from then on answers are parsed where they arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

Command = Sequence[str | bytes | float]


def pack(command: Command) -> bytes:
    """A command on the wire (https://redis.io/docs/latest/develop/reference/protocol-spec/), at a third of what
    redis-py, which takes more kinds of arguments, needs for it."""
    packed = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else word.encode() if isinstance(word, str) else repr(word).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(packed)


async def take_over(connection: Any, protocol: asyncio.Protocol) -> asyncio.Transport:
    """Connect and log in as redis-py does, and hear what comes from then on; raises what redis-py raises.

    The connection must be kept for as long as its transport.
    """
    try:
        await connection.connect()
    except BaseException:
        connection._close()
        raise
    transport = cast(asyncio.Transport, connection._writer.transport)
    transport.set_protocol(protocol)
    return transport
