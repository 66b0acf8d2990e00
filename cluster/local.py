"""A Ray of this machine only: started, and ended, with the process that holds it. Or one that is there already.

Of the local one everything listens on loopback, and nothing is reported anywhere. What Ray says goes to our log. The
process must start it from its main thread: Ray's children end with the thread that started them.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import tempfile
from types import TracebackType
from typing import Any

from headrace.broker.errors import ConfigError

log = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 1024 * 1024  # nothing of ours goes through it; Ray wants at least 75 MiB
_MAX_TEMP_PATH = 43  # Ray puts unix sockets below it

_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray bind and advertise 127.0.0.1
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` makes Ray upload the working directory
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
}


class LocalRay:
    """`with LocalRay(cpus, gpus): ...` is a running Ray Serve without a proxy."""

    def __init__(self, cpus: float, gpus: float) -> None:
        self._cpus = cpus
        self._gpus = gpus
        self._temp_dir = ""

    def __enter__(self) -> LocalRay:
        os.environ.update(_ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(16))
        os.environ.pop("RAY_ADDRESS", None)
        self._temp_dir = _short_temp_dir()
        import ray
        from ray import serve

        _say_in_our_log()
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, round(self._cpus + 0.5)),
            num_gpus=math.ceil(self._gpus),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.WARNING,
            _temp_dir=self._temp_dir,
        )
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()  # serve.shutdown() would say that a task failed, each time
        shutil.rmtree(self._temp_dir, ignore_errors=True)


class JoinedRay:
    """`with JoinedRay(address): ...` is a Ray Serve on a cluster that others run; it stays when this process ends."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> JoinedRay:
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        import ray
        from ray import serve

        _say_in_our_log()
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ConfigError(f"ray.address: {self._address!r}: no Ray cluster answers there") from error
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        ray.shutdown()


def _short_temp_dir() -> str:
    made = tempfile.mkdtemp(prefix="headrace-")
    if len(made) <= _MAX_TEMP_PATH:
        return made
    os.rmdir(made)
    return tempfile.mkdtemp(prefix="headrace-", dir="/tmp")


def _say_in_our_log() -> None:
    import ray._private.worker as ray_worker

    def say(data: dict[str, Any], ignore_prefix: bool = False) -> None:
        log.warning("ray: %s", " ".join(data["lines"])[:400], extra={"event": "ray_says"})

    ray_worker.print_to_stdstream = say
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
