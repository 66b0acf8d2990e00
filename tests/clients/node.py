"""Node, for clients that are npm packages; `make clients` installs those of package.json into the data folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HEADRACE_JS = ROOT / "client" / "js" / "headrace.js"
PACKAGES = Path(os.environ.get("HEADRACE_TEST_DATA", ROOT / ".headrace")) / "npm"


def node_program() -> str:
    """Raises FileNotFoundError if node or a package is missing."""
    program = shutil.which("node")
    if program is None:
        raise FileNotFoundError("there is no node on PATH")
    wanted = json.loads((HERE / "package.json").read_text("utf-8"))["dependencies"]
    for name, version in wanted.items():
        package = PACKAGES / "node_modules" / name / "package.json"
        if not package.exists() or json.loads(package.read_text("utf-8"))["version"] != version:
            raise FileNotFoundError(f"the npm package {name} {version} is not installed: run `make clients`")
    return program


class Node:
    """Runs scripts of this folder; what a script prints last, as JSON, is its answer."""

    def __init__(self, program: str, urls: list[str]) -> None:
        self._program = program
        self._urls = urls

    def run(self, script: str, task: str, *more: str, timeout_s: float = 30.0) -> Any:
        """Run the function `task` of a script, which may import packages and headrace.js."""
        said = self.execute((HERE / script).read_text("utf-8"), task, *more, timeout_s=timeout_s)
        return json.loads(said.splitlines()[-1])

    def execute(self, script: str, *arguments: str, timeout_s: float = 30.0) -> str:
        """What a script prints."""
        done = subprocess.run(
            [self._program, "--input-type=module", "-", *arguments],
            input=script,
            cwd=PACKAGES,  # where the names of packages are looked up
            env={
                **{name: value for name, value in os.environ.items() if name != "NODE_OPTIONS"},
                "URLS": " ".join(self._urls),
                "HEADRACE_JS": HEADRACE_JS.as_uri(),
                "NODE_NO_WARNINGS": "1",
            },
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
