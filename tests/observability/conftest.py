"""One watched deployment for the whole folder: it takes a quarter of a minute to have something to show."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker.embedded import EmbeddedServer
from tests.observability.watched import MODEL, Watched
from tests.system.conftest import Machine, scripted, until

AUTOSCALING = {"min_replicas": 1, "max_replicas": 4}


@pytest.fixture(scope="session")
def watched() -> Iterator[Watched]:
    """Two pods, two replicas, Prometheus; since it has been seen, a replica was killed."""
    model = scripted(tokens_per_s=50, slots=8, prefill_tokens_per_s=200.0, autoscaling=AUTOSCALING, name=MODEL)
    settings: dict[str, object] = {"models": [model], "queue": {"lease_s": 1.0}, "api": {"drain_s": 0.5}}
    machine = Machine(Path(tempfile.mkdtemp(prefix="hr-")), settings, pods=2)
    with asyncio.Runner() as runner:
        server = EmbeddedServer(str(machine.folder))
        runner.run(server.start())
        each = Watched(machine)
        running = each.start()
        try:
            next(running)
            until(lambda: each.load.rounds >= 3, 60)
            yield each
        finally:
            running.close()  # type: ignore[attr-defined]  # it is a generator
            machine.end()
            runner.run(server.stop())
            shutil.rmtree(machine.folder)
