"""What runs inside vLLM's own processes: an entry point of `vllm.general_plugins`, which vLLM calls in each of them.

It does nothing unless a replica of ours has started them. In the engine core it does two things: it ends with the
replica, also if that was killed; and a constraint goes on where an earlier attempt's tokens have led, which vLLM,
for which they are part of the prompt, would begin anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Any

REPLICA_PID = "HEADRACE_VLLM_REPLICA"
"""The variable of the environment that says whose processes these are."""

PREFIX_ARGUMENT = "headrace_prefix"
"""The extra argument with the tokens that the constraint has already seen."""

PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM, more than once in some processes."""
    replica = os.environ.get(REPLICA_PID)
    if not replica:
        return
    if os.getpid() != int(replica):
        _end_with_parent()
    _continue_constraints()


def _end_with_parent() -> None:
    """vLLM's engine core does not watch its parent; the kernel does, and it means the thread that started us.

    In a session of its own it does not get the Ctrl-C that tells the replica to drain.
    """
    with contextlib.suppress(OSError):
        os.setsid()
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent or parent == 1:
            os._exit(1)


def _continue_constraints() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    create = StructuredOutputManager._create_grammar
    if getattr(create, "is_headrace", False):
        return

    def create_and_go_on(self: Any, request: Any) -> Any:
        grammar = create(self, request)
        prefix = (request.sampling_params.extra_args or {}).get(PREFIX_ARGUMENT)
        if prefix and not grammar.accept_tokens(request.request_id, prefix):
            raise ValueError("the tokens so far do not follow the constraint")
        return grammar

    create_and_go_on.is_headrace = True  # type: ignore[attr-defined]
    StructuredOutputManager._create_grammar = create_and_go_on
