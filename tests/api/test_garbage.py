"""What a request leaves behind: nothing that only Python's collector of cycles would find, since it looks rarely."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually


@pytest.fixture
def found() -> Iterator[Counter[str]]:
    """The garbage of a test, by class, once it has called `gc.collect`."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    counted: Counter[str] = Counter()
    yield counted
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


def count(found: Counter[str]) -> None:
    gc.collect()
    kinds = (type(each) for each in gc.garbage)
    found.update(kind.__qualname__ for kind in kinds if kind.__module__.startswith(("headrace.", "uvicorn.")))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_has_ended_is_gone(deploy: Deploy, found: Counter[str], *, stream: bool) -> None:
    up = await deploy()
    await _ask(up, stream)
    count(Counter())
    gc.garbage.clear()
    for _ in range(5):
        await _ask(up, stream)
    await eventually(up.is_idle)
    count(found)
    assert not found


async def _ask(up: Deployment, stream: bool) -> None:
    answer = await (up.stream(max_tokens=3) if stream else up.post(max_tokens=3))
    assert answer.status == 200
