"""Chromium without a screen, told over its DevTools protocol what to evaluate.

Protocol: https://chromedevtools.github.io/devtools-protocol/. A driver is not needed for three of its calls.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

from tests.system.conftest import until

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


def chromium() -> str:
    """Raises FileNotFoundError if there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if program := shutil.which(name):
            return program
    raise FileNotFoundError("there is no chromium on PATH")


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


class Browser:
    """A running Chromium, with a profile that is thrown away."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._ids = 0

    def __enter__(self) -> Browser:
        with contextlib.ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hr-", ignore_cleanup_errors=True)))
            held.enter_context(_running([self._program, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]))
            said = folder / "DevToolsActivePort"
            until(lambda: said.exists() and len(said.read_text().split()) == 2, 30)
            port, path = said.read_text().split()
            self._socket = held.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None))
            self._held = held.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self, address: str, script: str, timeout_s: float = 30.0) -> Any:
        """Open a page and evaluate the body of an async function there; its JSON answer. Its exceptions are raised."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        try:
            self._call("Page.navigate", session, url=address)
            loaded = f"document.readyState == 'complete' && location.href == {json.dumps(address)}"
            until(lambda: self._evaluate(session, loaded), 30)
            return self._evaluate(session, f"(async () => {{ {script} }})()", timeout_s)
        finally:
            self._call("Target.closeTarget", targetId=target)

    def _evaluate(self, session: str, expression: str, timeout_s: float = 30.0) -> Any:
        answer = self._call(
            "Runtime.evaluate", session, timeout_s, expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _call(self, method: str, session: str | None = None, timeout_s: float = 30.0, **params: Any) -> dict[str, Any]:
        self._ids += 1
        target = {"sessionId": session} if session else {}
        self._socket.send(json.dumps({"id": self._ids, "method": method, "params": params, **target}))
        while True:
            said = json.loads(self._socket.recv(timeout=timeout_s))
            if said.get("id") == self._ids:
                assert "error" not in said, said["error"]
                result: dict[str, Any] = said["result"]
                return result
