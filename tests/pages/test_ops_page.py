"""The operations page in a real browser, over a deployment to which something happens."""

from __future__ import annotations

import contextlib
import re
import time

import httpx
import pytest
from playwright.async_api import Page, expect

from headrace.broker.messages import ScaleDecision
from tests.chromium import ON_ITS_LOOP
from tests.pages.conftest import picture
from tests.pages.test_playground import PHONE
from tests.pages.world import World

pytestmark = ON_ITS_LOOP


async def open_page(page: Page, world: World) -> None:
    await page.goto(f"{world.url}/ops")
    await page.wait_for_selector("html[data-ready]")


async def test_it_shows_what_is_there_and_follows_it(page: Page, world: World) -> None:
    await open_page(page, world)
    for model in ("scripted", "hostile", "broken", "mortal"):
        await expect(page.get_by_role("article", name=model)).to_contain_text("1 of 1 replicas ready")
    await expect(page.locator("#pods tr")).to_have_count(2)
    card = page.get_by_role("article", name="scripted")
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 400}
    async with (
        httpx.AsyncClient(timeout=30) as client,
        client.stream("POST", f"{world.urls[1]}/v1/chat/completions", json=body) as response,
    ):
        assert response.status_code == 200
        await expect(card.locator(".fleet li")).to_contain_text("1 of 64")
        await expect(page.locator("#facts")).to_contain_text(re.compile(r"Open streams1"))
        await expect(card.locator(".fleet li")).to_contain_text(re.compile(r"[1-9]\d* tok/s"))
        await picture(page, "ops")
    await expect(card.locator(".fleet li")).to_contain_text("0 of 64")


async def test_a_queue_a_lost_worker_and_a_dead_letter_are_seen(page: Page, world: World) -> None:
    await open_page(page, world)
    card = page.get_by_role("article", name="mortal")
    body = {"model": "mortal", "prompt": "hi", "stream": True, "max_tokens": 2000}
    async with httpx.AsyncClient(timeout=30) as client, contextlib.AsyncExitStack() as held:
        for _ in range(3):  # it has one slot
            stream = client.stream("POST", f"{world.url}/v1/completions", json=body)
            last = await held.enter_async_context(stream)
        assert last.status_code == 200
        await expect(card.locator(".bands div[data-waits=true]")).to_have_text("default2")
        await picture(page, "ops-queue")
        world.kill_worker("mortal")
        await expect(page.locator("#verdict")).to_contain_text("mortal: there is no replica")
        assert await page.locator("#verdict").get_attribute("data-state") == "failing"
        assert (await page.title()).startswith("Failing")
        await expect(page.locator("#verdict")).to_contain_text("1 dead letters in the last hour")
        await expect(page.locator("#dead tr")).to_contain_text("worker lost")
        await picture(page, "ops-failing")
    world.start_worker("mortal")
    await expect(card).to_contain_text("1 of 1 replicas ready")


async def test_what_an_autoscaler_decided_is_shown_with_its_reason(page: Page, world: World) -> None:
    await open_page(page, world)
    card = page.get_by_role("article", name="hostile")
    async with world.broker() as broker:
        now_ms = round(time.time() * 1000)
        await broker.note_decision("hostile", ScaleDecision(now_ms, 1, 2, "up", "backlog", waiting=7))
        await expect(card.locator(".decisions")).to_contain_text("up 1 → 2backlog: 7 waiting")
        await expect(page.locator("#verdict")).to_contain_text("hostile: 1 of 2 replicas are ready")
        await picture(page, "ops-scaling")
        await broker.note_decision("hostile", ScaleDecision(now_ms + 1, 2, 1, "down", "idle"))
        await expect(page.locator("#verdict")).not_to_contain_text("hostile")


async def test_a_hundred_replicas_are_seen_at_once(page: Page, world: World) -> None:
    async with world.crowd("scripted", 100):
        await open_page(page, world)
        tiles = page.get_by_role("article", name="scripted").locator(".fleet ul.dense li")
        await expect(tiles).to_have_count(101)
        heights = await tiles.evaluate_all("all => all.map((tile) => tile.getBoundingClientRect().bottom)")
        assert max(heights) < 1400
        await picture(page, "ops-hundred")


async def test_what_is_shown_is_what_the_snapshot_says(page: Page, world: World) -> None:
    await open_page(page, world)
    before = world.snapshot()["total"].get("requests", {}).get("ok", 0)
    async with httpx.AsyncClient() as client:
        for _ in range(3):
            body = {"model": "scripted", "prompt": "hi", "max_tokens": 3}
            await client.post(f"{world.urls[1]}/v1/completions", json=body)
    row = page.locator("#moved tr", has_text="Request: ok")
    await expect(row.locator("td").nth(2)).to_have_text(str(before + 3))
    seen = world.snapshot()
    await expect(page.locator("#facts")).to_contain_text(f"Requests, 5 min{sum(seen['recent']['requests'].values())}")
    by_pod = {pod["url"]: pod["requests"] for pod in seen["pods"]}
    for url, requests in by_pod.items():
        await expect(page.locator("#pods tr", has_text=url).locator("td").nth(2)).to_have_text(str(requests))


@pytest.mark.parametrize("context", [PHONE], indirect=True)
async def test_a_phone_shows_it_without_scrolling_sideways(page: Page, world: World) -> None:
    await open_page(page, world)
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await picture(page, "ops-phone")


@pytest.mark.parametrize("context", [{"color_scheme": "dark"}], indirect=True)
async def test_it_is_dark_where_that_is_wanted(page: Page, world: World) -> None:
    await open_page(page, world)
    await picture(page, "ops-dark")
