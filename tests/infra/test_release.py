"""A release: the version stands in one place, and what is built from it installs and serves on its own."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import httpx
import pytest
import yaml

from headrace.workers.engines.scripted import oracle
from tests.infra.tools import ROOT, VERSION, missing, run
from tests.system.conftest import answers, free_ports, until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and the wheel that was made from it."""
    if importlib.util.find_spec("build") is None:
        missing("build (pip install build)")
    source = tmp_path_factory.mktemp("release") / "source"
    names = run(["git", "ls-files", "-z"], ROOT).split("\0") if (ROOT / ".git").exists() else []
    if not names:
        missing("the project's git repository")
    for name in filter(None, names):
        if not name.startswith(("tests/", "infra/", "requirements/")) and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=not (ROOT / name).is_dir())
    run([sys.executable, "-W", "ignore", "-m", "build", "--no-isolation", "--outdir", source / "dist"], source)
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    run([python, "-m", "pip", "install", "--no-deps", "--no-index", *built.glob("*.whl")])
    [own] = folder.glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], "utf-8")
    return folder


def test_the_archives_are_whole(built: Path) -> None:
    [archive], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
    assert (archive.name, wheel.name) == (f"headrace-{VERSION}.tar.gz", f"headrace-{VERSION}-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {name.split("/")[1] for name in names if name.startswith("headrace/")}
    assert rooms == {"api", "broker", "cli", "client", "cluster", "workers"}
    for needed in ("broker/lua/admit.lua", "broker/headrace.yaml", "client/py.typed", "api/wire/sse.py"):
        assert f"headrace/{needed}" in names
    with tarfile.open(archive) as files:
        licences = [name for name in files.getnames() if name.endswith("/LICENSE")]
    assert licences


def test_the_version_stands_in_one_place() -> None:
    tracked = run(["git", "ls-files", "*.py", "*.lua"], ROOT).split()
    assert [name for name in tracked if f'"{VERSION}"' in (ROOT / name).read_text("utf-8")] == []


def test_the_changelog_speaks_of_the_next_release() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0] == "Unreleased" or headings[0].startswith(VERSION)


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(mkdtemp(prefix="hr-"))  # short, since sockets lie in it
    yield made
    shutil.rmtree(made)


def test_the_installed_wheel_serves(installed: Path, folder: Path) -> None:
    program = installed / "bin" / "headrace"
    assert run([program, "--version"], folder) == f"headrace {VERSION}\n"
    where = run([installed / "bin" / "python", "-c", "import headrace.broker as b; print(b.__file__)"], folder)
    assert where.startswith(str(installed))
    [port] = free_ports(1)
    models = [{"name": "scripted", "engine": "scripted", "cpus": 0.1}]
    (folder / "headrace.yaml").write_text(yaml.safe_dump({"models": models, "worker": {"drain_s": 0.2}}), "utf-8")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE_", "PYTHON"))}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, "serve"],
            cwd=folder,
            env={**clean, "HEADRACE_DATA": str(folder / "data"), "HEADRACE_PORT": str(port)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        said = folder / "log"
        until(lambda: "stop with Ctrl-C" in said.read_text("utf-8") or process.poll() is not None, 120)
        assert process.poll() is None, said.read_text("utf-8")
        assert answers(f"http://127.0.0.1:{port}")
        body = {"model": "scripted", "messages": [{"role": "user", "content": "new"}], "max_tokens": 2}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=30).json()
        text = "".join(f" {oracle('new', 0, 0, index):08x}" for index in range(2))
        assert answer["choices"][0]["message"]["content"] == text
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_source_archive_installs(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    [own] = (tmp_path / "venv").glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"], "utf-8")
    python = tmp_path / "venv" / "bin" / "python"
    [archive] = built.glob("*.tar.gz")
    run([python, "-m", "pip", "uninstall", "--yes", "setuptools"])  # an old one that comes with it
    quiet = [python, "-W", "ignore", "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*map(str, quiet), archive], tmp_path)
    assert "Usage: headrace" in run([tmp_path / "venv" / "bin" / "headrace", "--help"], tmp_path)
