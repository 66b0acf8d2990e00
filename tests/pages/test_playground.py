"""The playground in a real browser."""

from __future__ import annotations

import re

import pytest
from playwright.async_api import BrowserContext, Page, expect

from tests.chromium import ON_ITS_LOOP
from tests.pages.conftest import picture
from tests.pages.world import World, words

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}

pytestmark = ON_ITS_LOOP


async def open_page(page: Page, world: World, model: str = "scripted") -> None:
    response = await page.goto(world.url)
    assert response is not None
    assert "script-src 'self'" in response.headers["content-security-policy"]
    await page.wait_for_selector("html[data-ready]")
    await page.get_by_label("Model", exact=True).select_option(model)


async def ask(page: Page, prompt: str = "hi", tokens: int = 40) -> None:
    await page.get_by_label("Prompt", exact=True).fill(prompt)
    await page.get_by_label("Tokens, at most").fill(str(tokens))
    await page.get_by_role("button", name="Send").click()


async def job_of(page: Page) -> str:
    await expect(page.locator("#job")).to_have_text(re.compile(r"job [0-9a-f]{32}"))
    return str(await page.locator("#job").inner_text()).split()[1]


async def text_of(page: Page) -> str:
    return str(await page.locator("#text").evaluate("node => node.textContent"))


async def test_it_streams_and_says_how_fast(page: Page, world: World) -> None:
    await open_page(page, world)
    await ask(page, tokens=40)
    await expect(page.locator("#state")).to_have_attribute("data-state", "streaming")
    await expect(page.locator("#state")).to_have_text("done")
    assert await text_of(page) == words("hi", 40)
    assert await page.locator("#tokens").inner_text() == "40"
    assert re.fullmatch(r"\d+ ms", await page.locator("#ttft").inner_text())
    assert re.fullmatch(r"[\d.]+ ms", await page.locator("#itl").inner_text())
    assert 10 < float(await page.locator("#rate").inner_text()) < 60
    frames, other = await page.locator("#frames").inner_text(), await page.locator("#other").inner_text()
    assert "chat.completion.chunk" in frames and "[DONE]" in frames
    assert "content_block_delta" in other
    curl = await page.locator("#curl").inner_text()
    assert "/v1/chat/completions" in curl and f"Last-Event-ID: {await job_of(page)}." in curl
    await picture(page, "playground")


async def test_a_cut_connection_goes_on_and_nothing_is_lost(page: Page, world: World) -> None:
    await open_page(page, world)
    await ask(page, tokens=80)
    for times in (1, 2):
        await expect(page.locator("#state")).to_have_attribute("data-state", "streaming")
        await page.get_by_role("button", name="Cut the connection").click()
        await expect(page.locator("#notes")).to_contain_text("connection cut")
        await expect(page.locator("#notes li[data-kind=good]")).to_have_count(times)
    await expect(page.locator("#state")).to_have_text("done")
    assert await text_of(page) == words("hi", 80)
    assert "2 times cut and nothing lost" in await page.locator("#notes").inner_text()
    assert await page.locator("#strip .gap").count() == 2
    await picture(page, "playground-cut")


async def test_it_resumes_on_another_pod(page: Page, world: World) -> None:
    await open_page(page, world)
    await ask(page, tokens=60)
    await expect(page.locator("#state")).to_have_attribute("data-state", "streaming")
    await page.get_by_role("button", name="Resume on").click()
    other = world.urls[1].removeprefix("http://")
    await expect(page.locator("#notes")).to_contain_text(f"back at {other} after 1-")
    await expect(page.locator("#state")).to_have_text("done")
    assert await text_of(page) == words("hi", 60)
    assert world.urls[1] in await page.locator("#curl").inner_text()


async def test_cancel_ends_the_job(page: Page, world: World) -> None:
    await open_page(page, world)
    await ask(page, tokens=5000)
    await expect(page.locator("#state")).to_have_attribute("data-state", "streaming")
    job = await job_of(page)
    await page.get_by_role("button", name="Cancel").click()
    await expect(page.locator("#state")).to_have_text("cancelled")
    await expect(page.get_by_role("button", name="Send")).to_be_enabled()
    for _ in range(100):
        if world.state(job) == "cancelled":
            break
        await page.wait_for_timeout(50)
    assert world.state(job) == "cancelled"


async def test_an_error_is_shown_with_what_came_before_it(page: Page, world: World) -> None:
    await open_page(page, world, "broken")
    await ask(page)
    await expect(page.get_by_role("alert")).to_contain_text("engine_error")
    await expect(page.locator("#state")).to_have_text("failed")
    assert await text_of(page) == "half an answer"
    await picture(page, "playground-error")


async def test_what_a_model_says_is_text_and_nothing_else(page: Page, world: World) -> None:
    await open_page(page, world, "hostile")
    await ask(page)
    await expect(page.locator("#state")).to_have_text("done")
    text = page.locator("#text")
    assert "<script>window.owned = 1</script>" in await text_of(page)
    assert await text.locator("script, img, style, b, [onerror]").count() == 0
    assert await text.locator("a").evaluate_all("links => links.map((link) => link.href)") == ["https://example.org/a"]
    assert await page.evaluate("window.owned") is None
    assert await text.locator("strong").inner_text() == "bold"
    assert await text.locator("li").count() == 2
    assert "window.owned = 4" in await text.locator("pre code").inner_text()
    await picture(page, "playground-markdown")


async def test_the_policy_stops_what_would_get_through(context: BrowserContext, world: World) -> None:
    """Markup from a string, a handler, another origin: each is refused by the browser itself."""
    page = await context.new_page()
    await page.goto(world.url)
    refused = await page.evaluate(
        """async () => {
            const refused = [];
            document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
            const tried = [
                () => (document.body.innerHTML = "<p>"),
                () => document.body.setAttribute("onclick", "window.owned = 5"),
                () => fetch("http://127.0.0.1:1/"),
            ];
            for (const attempt of tried) try { await attempt(); } catch (error) { refused.push(error.name); }
            await new Promise((resolve) => setTimeout(resolve, 50));
            return refused;
        }"""
    )
    assert refused.count("TypeError") == 3
    assert {"require-trusted-types-for", "connect-src"} <= set(refused)


async def test_it_is_used_with_the_keyboard_alone(page: Page, world: World) -> None:
    await open_page(page, world)
    await page.keyboard.press("Tab")
    assert await page.evaluate("document.activeElement.className") == "skip"
    await page.keyboard.press("Enter")
    await page.keyboard.press("Tab")  # from the target of the link on
    await page.locator("#prompt").focus()
    await page.keyboard.press("Control+A")
    await page.keyboard.type("by hand")
    await page.keyboard.press("Control+Enter")
    await expect(page.locator("#state")).to_have_attribute("data-state", "streaming")
    reached = set()
    for _ in range(60):
        await page.keyboard.press("Tab")
        reached.add(await page.evaluate("document.activeElement.id"))
    assert {"cancel", "cut", "cut-to", "pod", "text", "frames", "other", "format", "copy"} <= reached
    await page.keyboard.press("Escape")
    await expect(page.locator("#state")).to_have_text("cancelled")
    assert (await text_of(page)).split()[0] == words("by hand", 1).strip()


async def test_everything_that_can_be_used_has_a_name(page: Page, world: World) -> None:
    await open_page(page, world)
    nameless = await page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea, [tabindex], svg[role]")]
            .filter((each) => !each.closest("dialog:not([open])"))
            .filter((each) => !(each.labels?.length || each.textContent.trim() || each.getAttribute("aria-label")
                || each.getAttribute("aria-labelledby"))).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    assert await page.locator("#text").get_attribute("aria-live") == "polite"
    assert await page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("context", [PHONE], indirect=True)
async def test_a_phone_shows_it_without_scrolling_sideways(page: Page, world: World) -> None:
    await open_page(page, world, "hostile")
    await ask(page)
    await expect(page.locator("#state")).to_have_text("done")
    assert await page.evaluate("document.documentElement.scrollWidth") <= 390
    await picture(page, "playground-phone")


@pytest.mark.parametrize("context", [{"color_scheme": "dark"}], indirect=True)
async def test_it_is_dark_where_that_is_wanted(page: Page, world: World) -> None:
    await open_page(page, world, "hostile")
    await ask(page)
    await expect(page.locator("#state")).to_have_text("done")
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert all(int(part) < 60 for part in re.findall(r"\d+", background))
    await picture(page, "playground-dark")
