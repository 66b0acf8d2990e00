"""By which address others reach a socket of this host."""

from __future__ import annotations

import contextlib
import socket

_ELSEWHERE = ("192.0.2.1", 9)
"""An address that is nobody's (RFC 5737): a UDP socket that is connected to it sends nothing, but has our own."""


def location(host: str, port: int) -> str:
    """`host:port`, of what is bound to `host`: this host's own address if that is all of them."""
    if host in ("", "0.0.0.0", "::"):
        host = _own_address()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _own_address() -> str:
    """The one that faces the network; a host's name may stand for its loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ELSEWHERE)
        address: str = probe.getsockname()[0]
        return address
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
