"""A real browser, started once a run: Debian's Chromium by its path. What is missing fails in CI, else skips."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from playwright.async_api import Browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ON_ITS_LOOP = pytest.mark.asyncio(loop_scope="session")
"""For tests that use it: they run on the loop that it was started on."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """One Chromium for all tests, each in a page of its own."""
    found = [program for name in ("chromium", "google-chrome") if (program := shutil.which(name))]
    if not found:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("there is no chromium on PATH")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(executable_path=found[0], args=FLAGS)
        yield running
        await running.close()


async def evaluate(browser: Browser, address: str, script: str) -> Any:
    """Open a page and run the body of an async function there; its JSON answer. Its exceptions are raised."""
    page = await browser.new_page()
    try:
        await page.goto(address)
        return await page.evaluate(f"(async () => {{ {script} }})()")
    finally:
        await page.close()
