"""A short search by coverage for bytes that break what reads them; SECURITY.md says how to run a long one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
SECONDS = 3


@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_are_found_that_break_it(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None and "CI" not in os.environ:
        pytest.skip("there is no atheris for this platform")
    command = [sys.executable, "-m", "tests.fuzz.run", name, str(SECONDS), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {0}" not in done.stderr and "Done" in done.stderr


@pytest.mark.parametrize("name", TARGETS)
def test_where_the_search_begins_holds(name: str) -> None:
    target, seeds = TARGETS[name]
    for seed in seeds():
        target(seed)
        target(seed[: len(seed) // 2])
