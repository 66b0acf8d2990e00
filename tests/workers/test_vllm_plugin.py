"""The plugin inside vLLM's processes: it ends them with their replica, and leaves everybody else's alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from headrace.workers.engines import vllm_plugin

CORE = """
import os, sys, time
from headrace.workers.engines import vllm_plugin
vllm_plugin._continue_constraints = lambda: None
vllm_plugin.register()
print(os.getpid(), os.getsid(0), flush=True)
time.sleep(60)
"""
REPLICA = f"""
import os, subprocess, sys, time
os.environ["HEADRACE_VLLM_REPLICA"] = str(os.getpid())
subprocess.Popen([sys.executable, "-c", {CORE!r}])
time.sleep(60)
"""


def test_a_killed_replica_takes_its_engine_core_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        core, session = map(int, replica.stdout.readline().split())
        assert core == session, "a Ctrl-C for the replica would reach its engine core"
        assert core != replica.pid
        replica.send_signal(signal.SIGKILL)
        assert replica.communicate(timeout=20)[0] == ""  # the pipe is closed once both are gone


def test_a_vllm_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_plugin.REPLICA_PID, raising=False)
    session = os.getsid(0)
    vllm_plugin.register()
    assert os.getsid(0) == session
    assert "vllm" not in sys.modules
