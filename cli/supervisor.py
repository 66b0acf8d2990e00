"""Child processes of `headrace serve`: started, watched, started again if they die, ended in order.

Each child is in a session of its own, so that Ctrl-C reaches only the parent, and is ended by the kernel if the parent
is gone, however it went.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence

from headrace.broker.embedded import die_with_parent

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 0.5, 1.0, 2.0, 5.0)
_STEADY_S = 10.0


class Child:
    """One role, filled by one process at a time. `on_line` gets its standard output, line by line."""

    def __init__(
        self,
        role: str,
        arguments: Sequence[str],
        fds: Sequence[int] = (),
        on_line: Callable[[bytes], None] | None = None,
    ) -> None:
        self.role = role
        self.process: asyncio.subprocess.Process | None = None
        self._arguments = arguments
        self._fds = fds
        self._on_line = on_line
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"child {self.role}")

    async def _keep(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            started = loop.time()
            await self._run_once()
            if self._is_stopping:
                return
            failures = 0 if loop.time() - started > _STEADY_S else failures + 1
            delay_s = _BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)]
            log.warning("%s ended, starting it again in %g s", self.role, delay_s, extra={"event": "child_ended"})
            await asyncio.sleep(delay_s)

    async def _run_once(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "headrace.cli.main",
            *self._arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            if self._on_line is not None:
                self._on_line(line)
        await self.process.wait()

    async def stop(self, patience_s: float, *, force: asyncio.Event) -> None:
        """SIGTERM; SIGKILL when patience is over, or when `force` is set."""
        self._is_stopping = True
        if self.process is not None and self.process.returncode is None:
            self._signal(signal.SIGTERM)
            waits = [asyncio.ensure_future(self.process.wait()), asyncio.ensure_future(force.wait())]
            await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            self._signal(signal.SIGKILL)
            await self.process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
