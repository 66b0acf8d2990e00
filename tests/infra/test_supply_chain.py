"""What the project is made of: locked by hash, and listed for whoever must know."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from tests.infra.tools import ROOT, VERSION, missing, run

LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
_PACKAGE = re.compile(r"^([a-z0-9._-]+)(?:\[.*\])?==([^ ;\\]+)", re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_locked_package_has_its_hashes_and_no_address(lock: Path) -> None:
    text = lock.read_text("utf-8")
    for entry in re.split(r"\n(?=\S)", text):
        assert "==" in entry and "--hash=sha256:" in entry, entry[:80]
    assert "://" not in text and "--index" not in text and "--find-links" not in text


def test_the_list_of_what_an_image_is_made_of_has_every_package_with_its_hash(tmp_path: Path) -> None:
    if importlib.util.find_spec("cyclonedx_py") is None:
        missing("cyclonedx-py (pip install cyclonedx-bom)")
    lock, out = ROOT / "requirements" / "api.txt", tmp_path / "api.cdx.json"
    options: list[str | Path] = [
        "--pyproject",
        ROOT / "pyproject.toml",
        "--output-reproducible",
        "--spec-version",
        "1.6",
    ]
    run([sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", *options, "--output-file", out, lock])
    listed = json.loads(out.read_text("utf-8"))
    assert (listed["bomFormat"], listed["specVersion"]) == ("CycloneDX", "1.6")
    assert (listed["metadata"]["component"]["name"], listed["metadata"]["component"]["version"]) == (
        "headrace",
        VERSION,
    )
    found = {(each["name"], each["version"]) for each in listed["components"]}
    assert found == set(_PACKAGE.findall(lock.read_text("utf-8")))
    for each in listed["components"]:
        assert each["externalReferences"][0]["hashes"], each["name"]


def test_the_makefile_makes_the_same_list_for_every_image() -> None:
    makefile, dockerfile = ((ROOT / name).read_text("utf-8") for name in ("Makefile", "Dockerfile"))
    [names] = re.findall(r"for name in ([a-z ]+); do \\\n\t\t\$\(BIN\)/cyclonedx-py", makefile)
    used = set(re.findall(r"requirements/([a-z]+)\.txt", dockerfile)) - {"wheel"}
    assert used <= set(names.split())
