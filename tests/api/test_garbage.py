"""What a request leaves behind: nothing that only Python's collector of cycles would find, since it looks rarely."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.api.reply import Reply
from headrace.api.server import PodProtocol
from headrace.broker.tail import Reader
from headrace.broker.writer import Track
from headrace.workers.run import JobRun
from tests.api.conftest import Deploy
from tests.support import eventually

MADE = (PodProtocol, Reply, Reader, JobRun, Track)
"""What is made for a connection or a request, and holds the rest of it."""


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Any]]]:
    """All that the test has made of these, while nobody collects cycles."""
    made: list[weakref.ref[Any]] = []

    def remember(kind: type[Any]) -> None:
        initialize = kind.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            initialize(self, *args, **kwargs)
            made.append(weakref.ref(self))

        monkeypatch.setattr(kind, "__init__", init)

    for kind in MADE:
        remember(kind)
    gc.disable()
    yield made
    gc.enable()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_has_ended_is_gone(deploy: Deploy, alive: list[weakref.ref[Any]], *, stream: bool) -> None:
    up = await deploy()
    for _ in range(3):
        answer = await (up.stream(max_tokens=3) if stream else up.post(max_tokens=3))
        assert answer.status == 200
    assert len(alive) >= 3 * len(MADE)
    await eventually(lambda: {type(each()).__name__ for each in alive} == {"NoneType"})
