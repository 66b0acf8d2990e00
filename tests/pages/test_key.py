"""A pod that asks for a key, and the pages that ask for it in turn."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest
from playwright.async_api import Page, expect

from tests.chromium import ON_ITS_LOOP
from tests.pages.world import MODELS, World, words
from tests.system.conftest import MakeMachine, answers, until

pytestmark = ON_ITS_LOOP

SECRET = "hr-right-4821"
ADMIN = {"owner": "root", "sha256": hashlib.sha256(SECRET.encode()).hexdigest(), "scopes": ["use", "admin"]}


@pytest.fixture(scope="module")
def url(world: World, make_machine: MakeMachine) -> Iterator[str]:
    """One more pod of the same deployment, with a key."""
    machine = make_machine({"models": MODELS, "redis": {"url": world.broker_url}, "keys": [ADMIN]})
    pod = machine.start("api")
    until(lambda: answers(machine.urls[0]), 30)
    yield machine.urls[0]
    pod.terminate()
    pod.wait(20)


async def test_the_pages_ask_for_the_key_and_keep_it_in_the_tab_only(page: Page, url: str) -> None:
    await page.goto(url)
    dialog = page.get_by_role("dialog", name="API key")
    await expect(dialog).to_contain_text("missing")
    await page.keyboard.type("wrong")
    async with page.expect_response("**/v1/models"):
        await page.keyboard.press("Enter")
    await expect(dialog).to_be_visible()
    await page.keyboard.type(SECRET)
    await page.keyboard.press("Enter")
    await expect(dialog).to_be_hidden()
    await page.wait_for_selector("html[data-ready]")
    await page.get_by_label("Prompt", exact=True).fill("hi")
    await page.get_by_label("Tokens, at most").fill("5")
    await page.get_by_role("button", name="Send").click()
    await expect(page.locator("#text")).to_have_text(words("hi", 5).strip())
    assert await page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    curl = await page.locator("#curl").inner_text()
    assert "$HEADRACE_API_KEY" in curl
    assert SECRET not in await page.content()
    await page.goto(f"{url}/ops")
    await expect(page.locator("#verdict-word")).not_to_have_text("Looking …")
    await expect(page.get_by_role("article", name="scripted")).to_be_visible()
