"""The autoscaling policy on a cluster that others run: its configuration is read where the controller is.

Serve pickles this module by value into its controller, so it holds nothing but this class.
"""

from __future__ import annotations

from typing import Any


class NodePolicy:
    """`Policy` for a model of the file `config`; what is given to Serve, and shown by it, holds no password."""

    def __init__(self, config: str, model: str) -> None:
        import os

        import msgspec

        from headrace.broker import settings
        from headrace.cluster.policy import Policy

        read = settings.load(config, os.environ)
        self._policy = Policy(msgspec.to_builtins(read), model, read.redis.url or "", watches=True)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """See `Policy`."""
        return self._policy(context)
