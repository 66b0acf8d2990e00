"""Snapshots of the deployment for who looks at it: one a second and pod while anybody does, made once for all."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.carrier import leave
from headrace.api.connection import Connection
from headrace.api.pod import Pod
from headrace.api.wire import sse
from headrace.broker import snapshot
from headrace.broker.errors import BrokerDown
from headrace.broker.tasks import cancel_all
from headrace.broker.verdict import Trouble

PERIOD_S = 1.0
_FRESH_S = 0.5


class Watch:
    """See the module. `viewers` are woken after each new `frame`."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.frame = b""
        self.viewers: set[Viewer] = set()
        self._looking: asyncio.Task[None] | None = None
        self._snapshot = b""
        self._read_at = 0.0
        self._lock = asyncio.Lock()

    async def snapshot(self) -> bytes:
        """The snapshot now, as JSON; however many ask, the broker is asked twice a second. Raises BrokerDown."""
        async with self._lock:
            if time.monotonic() - self._read_at >= _FRESH_S:
                self._snapshot = sse.encode(await snapshot.look(self.pod.broker, self.pod.settings))
                self._read_at = time.monotonic()
            return self._snapshot

    def enter(self, viewer: Viewer) -> None:
        self.viewers.add(viewer)
        if self.frame:
            viewer.wake.set()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look(), name="watch")

    async def leave(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers and self._looking is not None:
            looking, self._looking, self.frame = self._looking, None, b""
            await cancel_all([looking])

    async def _look(self) -> None:
        while True:
            try:
                payload = await self.snapshot()
            except BrokerDown as error:
                payload = sse.encode(Trouble.of(error))
            self.frame = sse.frame("", payload)
            for viewer in self.viewers:
                viewer.wake.set()
            await asyncio.sleep(PERIOD_S)


class Viewer(Response):
    """The stream of snapshots to one client, who gets the newest whenever it has taken the last; it never ends before
    the client leaves or the pod drains."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.wake = asyncio.Event()
        self._watch = watch
        self._is_gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not leave(scope, partial(self._serve, scope, receive, send)):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, watcher = Connection.of(scope), None
        connection.when_half_closed(connection.abort)
        if connection.can_tell_lost():
            connection.when_lost(self._go)
        else:
            watcher = asyncio.create_task(self._await_leaving(receive), name="watch client")
        self._watch.enter(self)
        try:
            async with asyncio.timeout(None) as patience:
                await self._write(send, patience)
        except TimeoutError:
            connection.abort()
        finally:
            await self._watch.leave(self)
            if watcher is not None:
                await cancel_all([watcher])

    def _go(self) -> None:
        self._is_gone = True
        self.wake.set()

    async def _await_leaving(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._go()

    async def _write(self, send: Send, patience: asyncio.Timeout) -> None:
        pod, loop = self._watch.pod, asyncio.get_running_loop()
        named = {"content-type": sse.MEDIA_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}
        headers = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while True:
            await self.wake.wait()
            self.wake.clear()
            if self._is_gone:
                return
            patience.reschedule(loop.time() + pod.settings.api.slow_client_timeout_s)
            await send({"type": "http.response.body", "body": self._watch.frame, "more_body": not pod.is_draining})
            patience.reschedule(None)
            if pod.is_draining:
                return
