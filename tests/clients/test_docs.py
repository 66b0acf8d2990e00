"""Commands and programs of the pages, run as they stand: each works, and there is a command for every route."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.routing import compile_path

from tests.clients.deployment import Deployment
from tests.clients.node import HEADRACE_JS, Node

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:8080"
CLIENTS = (ROOT / "docs" / "client.md").read_text("utf-8")
SECTIONS = {part.partition("\n")[0]: part for part in PAGE.split("\n## ")[1:]}
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)
STRICT = 'set -euo pipefail\ncurl() { command curl -sS --fail-with-body "$@"; echo; }\n'
_ERROR = re.compile(r'^(data: )?\{"error"|^event: (error|response\.failed)', re.MULTILINE)
REFUSED = {"/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs/{digest}"}
"""There only to say that they are not there."""


@pytest.mark.parametrize("section", [name for name, text in SECTIONS.items() if BLOCK.search(text)])
def test_the_commands_of_a_section_work(world: Deployment, section: str) -> None:
    for block in BLOCK.findall(SECTIONS[section]):
        script = STRICT + block.replace(ADDRESS, world.url)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        assert done.stdout.strip() and not _ERROR.search(done.stdout), block


def test_every_route_has_its_command(world: Deployment) -> None:
    commands = [command for block in BLOCK.findall(PAGE) for command in re.split(r"\bcurl\b", block)[1:]]
    called = set()
    for command in commands:
        found = re.search(rf"{ADDRESS}(/[^\s\"'?]*)", command)
        assert found, command
        stated = re.search(r"-X (\w+)", command)
        method = stated[1] if stated else "POST" if re.search(r"\s-d\b", command) else "GET"
        called.add((method.lower(), found[1].replace("$job", "job").replace("$id", "id")))
    paths = httpx.get(f"{world.url}/openapi.json").json()["paths"]
    routes = {(method, path) for path, methods in paths.items() for method in methods if method != "head"}
    missing = {
        (method, path)
        for method, path in routes
        if path not in REFUSED and not any(m == method and compile_path(path)[0].match(p) for m, p in called)
    }
    assert missing == set()


def test_the_python_client_is_as_its_page_shows(world: Deployment) -> None:
    done = subprocess.run([sys.executable, "-c", program("python", world)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "Paris" in done.stdout) == (0, True), done.stderr


def test_the_javascript_client_is_as_its_page_shows(world: Deployment, node: Node) -> None:
    script = program("js", world).replace("./headrace.js", HEADRACE_JS.as_uri())
    assert "Paris" in node.execute(script)


def program(language: str, world: Deployment) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```$", CLIENTS, re.DOTALL | re.MULTILINE)
    assert found.count("http://127.0.0.1:808") == 2
    return str(found.replace(ADDRESS, world.urls[0]).replace("http://127.0.0.1:8081", world.urls[1]))
