"""Where a model file is taken from, and what is said when it cannot be had."""

from __future__ import annotations

import fcntl
import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import LlamacppModel, WheelFile
from headrace.workers.engines import model_files

CONTENT = b"GGUF" + b"weights" * 1000
FILE = "tiny_model/tiny.gguf"


def tiny(content: bytes = CONTENT, *, version: str = "1.0", file: str = FILE) -> LlamacppModel:
    source = WheelFile("tiny-model", version, file, hashlib.sha256(content).hexdigest())
    return LlamacppModel(name="tiny", source=source)


def build_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(FILE, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def install(folder: Path, content: bytes = CONTENT) -> Path:
    info = folder / "tiny_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    package = folder / "tiny_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / "tiny.gguf").write_bytes(content)
    return package / "tiny.gguf"


class Told:
    """Keeps what `progress` was told."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.is_called = threading.Event()

    def __call__(self, what: str, share: float) -> None:
        assert 0.0 <= share <= 1.0
        self.words.append(what)
        self.is_called.set()


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """pip with an index that nobody serves, and with no other place to look."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return monkeypatch


@pytest.fixture
def wheel(offline: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with the wheel, where pip finds it."""
    folder = build_wheel(tmp_path / "wheels")
    offline.setenv("PIP_FIND_LINKS", str(folder))
    offline.setenv("PIP_NO_INDEX", "1")
    return folder


def leftovers(data_dir: Path) -> list[str]:
    return sorted(path.suffix for path in (data_dir / "models").iterdir())


def test_a_path_is_taken_as_it_is(tmp_path: Path, told: Told) -> None:
    file = tmp_path / "any.gguf"
    file.write_bytes(CONTENT)
    assert model_files.find(LlamacppModel(name="m", path=str(file)), tmp_path, told) == file


def test_a_missing_path_is_a_configuration_error(tmp_path: Path, told: Told) -> None:
    with pytest.raises(ConfigError, match=r"models\[\]\.path: .*none\.gguf cannot be read: No such file"):
        model_files.find(LlamacppModel(name="m", path=str(tmp_path / "none.gguf")), tmp_path, told)


def test_a_path_to_something_else_is_a_configuration_error(tmp_path: Path, told: Told) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        model_files.find(LlamacppModel(name="m", path=str(tmp_path / "page.gguf")), tmp_path, told)


def test_a_wheel_is_fetched_once_and_then_kept(tmp_path: Path, wheel: Path, told: Told) -> None:
    first = model_files.find(tiny(), tmp_path / "data", told)
    assert first.read_bytes() == CONTENT
    assert first.name.endswith("-tiny.gguf")
    assert {"downloading", "checking"} <= set(told.words)
    assert leftovers(tmp_path / "data") == [".checked", ".gguf", ".lock"]
    (wheel / "tiny_model-1.0-py3-none-any.whl").unlink()
    again = Told()
    assert model_files.find(tiny(), tmp_path / "data", again) == first
    assert again.words == []


def test_a_kept_file_that_was_damaged_is_fetched_again(tmp_path: Path, wheel: Path, told: Told) -> None:
    model_files.find(tiny(), tmp_path, told).write_bytes(b"GGUF, but not all of it")
    assert model_files.find(tiny(), tmp_path, told).read_bytes() == CONTENT


def test_a_kept_file_that_was_only_touched_is_checked_and_kept(tmp_path: Path, wheel: Path, told: Told) -> None:
    model_files.find(tiny(), tmp_path, told).touch()
    again = Told()
    model_files.find(tiny(), tmp_path, again)
    assert again.words == ["checking"]


def test_another_checksum_is_a_configuration_error_and_leaves_nothing(tmp_path: Path, wheel: Path, told: Told) -> None:
    with pytest.raises(ConfigError, match="has the checksum"):
        model_files.find(tiny(b"something else"), tmp_path / "data", told)
    assert leftovers(tmp_path / "data") == [".lock"]


def test_a_file_that_the_wheel_lacks_is_a_configuration_error(tmp_path: Path, wheel: Path, told: Told) -> None:
    with pytest.raises(ConfigError, match=r"has no file tiny_model/other\.gguf"):
        model_files.find(tiny(file="tiny_model/other.gguf"), tmp_path, told)


def test_a_half_wheel_is_an_engine_failure(tmp_path: Path, told: Told) -> None:
    half = tmp_path / "half.whl"
    half.write_bytes(next(build_wheel(tmp_path / "wheels").iterdir()).read_bytes()[:500])
    source = tiny().source
    assert source is not None
    with pytest.raises(EngineFailed, match="not a whole wheel"):
        model_files._unpack(half, source, tmp_path)


def test_an_installed_distribution_serves_without_being_imported(
    tmp_path: Path, offline: pytest.MonkeyPatch, told: Told
) -> None:
    file = install(tmp_path / "site")
    offline.syspath_prepend(str(tmp_path / "site"))
    assert model_files.find(tiny(), tmp_path / "data", told) == file
    assert told.words == ["checking"]
    assert "tiny_model" not in sys.modules


def test_an_installed_file_with_another_checksum_is_a_configuration_error(
    tmp_path: Path, offline: pytest.MonkeyPatch, told: Told
) -> None:
    install(tmp_path / "site", b"GGUF another")
    offline.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError, match="has the checksum"):
        model_files.find(tiny(), tmp_path / "data", told)


def test_an_installed_distribution_of_another_version_is_passed_over(
    tmp_path: Path, offline: pytest.MonkeyPatch, told: Told
) -> None:
    install(tmp_path / "site")
    offline.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(EngineFailed, match=r"tiny-model==2\.0"):
        model_files.find(tiny(version="2.0"), tmp_path / "data", told)


@pytest.mark.usefixtures("offline")
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, told: Told) -> None:
    with pytest.raises(EngineFailed, match=r"pip cannot fetch tiny-model==1\.0: .*set models\[\]\.path to it"):
        model_files.find(tiny(), tmp_path / "data", told)
    assert leftovers(tmp_path / "data") == [".lock"]


def test_a_data_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path, told: Told) -> None:
    (tmp_path / "data").write_text("a file")
    with pytest.raises(ConfigError, match="data_dir: "):
        model_files.find(tiny(), tmp_path / "data", told)


@pytest.mark.usefixtures("offline")
def test_what_progress_raises_ends_the_download(tmp_path: Path) -> None:
    def stop(what: str, share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_files.find(tiny(), tmp_path / "data", stop)
    assert leftovers(tmp_path / "data") == [".lock"]


@pytest.mark.usefixtures("wheel")
def test_replicas_that_start_together_wait_for_one_download(tmp_path: Path) -> None:
    source = tiny().source
    assert source is not None
    (tmp_path / "models").mkdir()
    replicas = [Told(), Told()]
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda told=told: found.append(model_files.find(tiny(), tmp_path, told)))
        for told in replicas
    ]
    with (tmp_path / "models" / f"{source.sha256[:12]}-tiny.gguf.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for thread in threads:
            thread.start()
        assert all(told.is_called.wait(10) for told in replicas)
        assert found == []
    for thread in threads:
        thread.join(60)
    assert [path.read_bytes() for path in found] == [CONTENT] * 2
    assert sorted(told.words.count("checking") for told in replicas) == [0, 1]


def test_the_share_is_read_from_the_last_line_about_it() -> None:
    assert model_files.share("Collecting x\nProgress 0 of 200\nProgress 50 of 200\nSaved") == 0.25
    assert model_files.share("Progress 300 of 200\n") == 1.0
    assert model_files.share("Progress 5 of 0\nProgress of all\n") == 0.0
