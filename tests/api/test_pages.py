"""The pages' files: all there, under a policy that lets nothing else run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api.conftest import Deploy

FOLDER = Path(__file__).parents[2] / "api" / "pages"
PAGES = {"/": "playground.html", "/ops": "ops.html"}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MAKES_MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|\burl\(")
REFERENCE = re.compile(r'(?:src|href)="([^"#]+)"|from "\./([\w.]+)"')


def test_there_is_nothing_inline_and_nothing_of_others() -> None:
    for path in FOLDER.glob("*.html"):
        text = path.read_text("utf-8")
        assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", text), path
        assert "//" not in text
    for path in [*FOLDER.glob("*.js"), *FOLDER.glob("*.css")]:
        text = path.read_text("utf-8")
        assert not MAKES_MARKUP.search(text), path
        assert "localStorage" not in text


async def test_every_file_that_a_page_names_is_served(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    wanted = list(PAGES)
    seen: set[str] = set()
    while wanted:
        if (path := wanted.pop()) in seen:
            continue
        seen.add(path)
        answer = await up.ask("GET", path, headers=BROWSER)
        assert answer.status == 200, path
        if not path.endswith(".svg"):
            wanted += [
                of_page or f"/assets/{of_module}" for of_page, of_module in REFERENCE.findall(answer.body.decode())
            ]
    files = {f"/assets/{path.name}" for path in FOLDER.iterdir() if path.suffix != ".html"} | {"/assets/headrace.js"}
    assert seen == files | set(PAGES)


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_has_a_strict_policy_and_a_tag(deploy: Deploy, path: str) -> None:
    up = await deploy(workers=0, api={"origins": ["http://127.0.0.1:1", "*"]})
    answer = await up.ask("GET", path, headers=BROWSER)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["connect-src"] == "'self' http://127.0.0.1:1"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    again = await up.ask("GET", path, headers={**BROWSER, "if-none-match": answer.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapp.py", "%2Fetc%2Fpasswd", "__init__.py", ""])
async def test_nothing_else_is_served(deploy: Deploy, name: str) -> None:
    up = await deploy(workers=0)
    answer = await up.ask("GET", f"/assets/{name}")
    assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_the_pods_that_a_page_may_ask_are_listed(deploy: Deploy) -> None:
    up = await deploy(workers=0, pods=2)
    one, other = (pod.url for pod in up.pods)
    assert (await up.ask("GET", "/v1/pods")).json["data"] == [{"url": one, "is_this": True}]
    settings = up.state().settings
    settings.api.origins.append(other)
    assert (await up.ask("GET", "/v1/pods")).json["data"] == [
        {"url": one, "is_this": True},
        {"url": other, "is_this": False},
    ]
