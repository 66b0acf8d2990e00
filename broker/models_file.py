"""The models of a configuration file, followed: who serves them need not be started anew when they change.

Only `models` is followed. Whatever else has changed takes a restart, and a file that cannot be read, or says what
cannot be, changes nothing: both are logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec import structs

from headrace.broker import settings
from headrace.broker.errors import ConfigError
from headrace.broker.settings import Settings

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class ModelsFile:
    """`path` as for `settings.load`; `env` is the process's environment, whose overrides hold for every reading."""

    def __init__(self, path: str | Path | None, env: Mapping[str, str], known: Settings) -> None:
        self._file = settings.find(path)
        self._env = env
        self._known = known
        self._seen = self._stamp()

    async def follow(self, on_change: Callable[[Settings], None]) -> None:
        """Look once a second, for ever; `on_change` gets the settings that are known, with the new models."""
        while True:
            await asyncio.sleep(PERIOD_S)
            if (changed := self.changed()) is not None:
                on_change(changed)

    def changed(self) -> Settings | None:
        """The settings with the file's models, if these are others than when it was last asked."""
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            read = settings.load(self._file, self._env)
        except ConfigError as error:
            log.error("the configuration has changed, but %s", error.message, extra={"event": "config_refused"})
            return None
        self._say_what_waits(read)
        if read.models == self._known.models:
            return None
        self._known = structs.replace(self._known, models=read.models)
        log.warning("the models of %s have changed", self._file, extra={"event": "models_changed"})
        return self._known

    def _say_what_waits(self, read: Settings) -> None:
        # `serve` sets the other two for its children in their environment
        others = [name for name in Settings.__struct_fields__ if name not in ("models", "data_dir", "log_level")]
        if waits := [name for name in others if getattr(read, name) != getattr(self._known, name)]:
            log.warning("%s: takes effect with the next start", ", ".join(waits), extra={"event": "config_waits"})

    def _stamp(self) -> tuple[int, int, int] | None:
        """What tells one writing of the file from another; a link, as Kubernetes has it, is followed."""
        try:
            found = self._file.stat()
        except OSError:
            return None  # it is being replaced
        return found.st_mtime_ns, found.st_ino, found.st_size
