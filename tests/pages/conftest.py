"""Two pods, a worker for each model, and a real browser in front of them; what is missing fails in CI, else skips.

All runs on one event loop, that of the whole run: the browser is started once, each test has a context of its own.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from playwright.async_api import Browser, BrowserContext, ConsoleMessage, Page

from tests.chromium import browser
from tests.pages.world import World
from tests.support import own_server
from tests.system.conftest import MakeMachine, machines

__all__ = ["browser"]

make_machine = pytest.fixture(scope="package")(machines)

HERE = Path(__file__).parent
PICTURES = Path(os.environ.get("CI_ARTIFACTS", HERE.parents[1] / ".headrace")) / "pictures"
_EXPECTED = ("status of 4", "status of 5", "net::ERR_")
"""What a browser says by itself of an answer that is an error; a test that makes one means it."""


@pytest.fixture(scope="package")
def world(make_machine: MakeMachine) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, own_server(folder) as broker_url:
        made = World(make_machine(World.settings(broker_url), pods=2), broker_url)
        made.start()
        yield made
        made.end()


@pytest_asyncio.fixture(loop_scope="session")
async def context(browser: Browser, request: pytest.FixtureRequest) -> AsyncIterator[BrowserContext]:
    """A fresh profile; `@pytest.mark.parametrize("context", [{...}], indirect=True)` sets what it is like."""
    made = await browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **getattr(request, "param", {})})
    yield made
    await made.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(context: BrowserContext) -> AsyncIterator[Page]:
    """A page in which nothing may go wrong that the test does not expect."""
    made, wrong = await context.new_page(), []
    made.set_default_timeout(20_000)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(words in message.text for words in _EXPECTED):
            wrong.append(message.text)

    made.on("console", on_console)
    made.on("pageerror", lambda error: wrong.append(str(error)))
    yield made
    assert wrong == []


async def picture(page: Page, name: str, **how: Any) -> None:
    """Keep what it looks like, for people."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=PICTURES / f"{name}.png", full_page=True, **how)
