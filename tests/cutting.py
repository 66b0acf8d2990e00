"""Connections that break where a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class CuttingProxy:
    """Passes a connection on to a pod and breaks it after so many bytes of the response, one number a connection."""

    def __init__(self, target: str, limits: list[int]) -> None:
        self._port = int(target.rpartition(":")[2])
        self._limits = limits
        self._open: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        pod_reader, pod_writer = await asyncio.open_connection("127.0.0.1", self._port)
        limit = self._limits.pop(0) if self._limits else 1 << 30
        ways = [
            asyncio.create_task(self._pass_on(reader, pod_writer, 1 << 30)),
            asyncio.create_task(self._pass_on(pod_reader, writer, limit)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in (writer, pod_writer):
                each.close()
                with contextlib.suppress(ConnectionError):
                    await each.wait_closed()

    async def close(self) -> None:
        """End connections that a client keeps open."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    @staticmethod
    async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int) -> None:
        while left and (data := await reader.read(min(left, 4096))):
            writer.write(data)
            await writer.drain()
            left -= len(data)


@contextlib.asynccontextmanager
async def cutting(target: str, limits: list[int]) -> AsyncIterator[str]:
    proxy = CuttingProxy(target, limits)
    listener = await asyncio.start_server(proxy, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        await proxy.close()
        await listener.wait_closed()
