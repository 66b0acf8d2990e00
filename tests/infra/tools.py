"""What the tests of this folder need beside Python: programs, and data that not every machine has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
HEADRACE = Path(sys.executable).parent / "headrace"
"""The command of this installation."""
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def is_ci() -> bool:
    return os.environ.get("CI", os.environ.get("HEADRACE_CI", "")) not in ("", "0", "false")


def missing(what: str) -> NoReturn:
    """Say that something is not here: a failure where everything must be, else a skip with its reason."""
    if is_ci():
        pytest.fail(f"missing: {what}")
    pytest.skip(f"not here: {what}")


def program(name: str, install: str) -> str:
    """The path of a program, of the virtual environment first; `install` says how it is had."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        missing(f"{name} ({install})")
    return found


def run(
    command: Sequence[str | Path], cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout_s: float = 300
) -> str:
    """The output of a command that must succeed; its words are the failure's if it does not."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-8000:]}"
    return done.stdout
