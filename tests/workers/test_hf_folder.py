"""Where a Hugging Face model is found, and how one is made of a GGUF file, without any weights."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import VllmModel
from headrace.workers.engines import hf_folder

Fake = Callable[[str], None]


def quiet(what: str, share: float) -> None: ...


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"GGUF tiny")
    return path


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Run this shell script in place of the conversion, which makes `$folder` of `$file`."""

    def use(script: str) -> None:
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\nfile=$3\nfolder=$4\n{script}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(fake))

    return use


def model(path: Path) -> VllmModel:
    return VllmModel(name="m", path=str(path))


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert hf_folder.find(model(tmp_path), tmp_path / "data", quiet) == str(tmp_path)


def test_a_folder_without_a_model_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        hf_folder.find(model(tmp_path), tmp_path / "data", quiet)


def test_what_is_on_the_hub_is_kept_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "of this test")  # so that it is taken back
    monkeypatch.delenv("HF_HOME")
    assert hf_folder.find(VllmModel(name="m", hub="org/model"), tmp_path, quiet) == "org/model"
    assert os.environ["HF_HOME"] == str(tmp_path / "huggingface")


def test_a_gguf_file_is_converted_once_and_its_progress_told(tmp_path: Path, gguf: Path, converter: Fake) -> None:
    told: list[tuple[str, float]] = []
    converter(
        'echo SHARE 0.5; sleep 0.5; mkdir "$folder"; cp "$file" "$folder/model"; echo x >> "$(dirname "$0")/runs"'
    )
    first = hf_folder.find(model(gguf), tmp_path / "data", lambda *what: told.append(what))
    assert (Path(first) / "model").read_bytes() == b"GGUF tiny"
    assert ("converting", 0.5) in told
    assert hf_folder.find(model(gguf), tmp_path / "data", quiet) == first
    assert (tmp_path / "runs").read_text() == "x\n"
    assert sorted(path.name for path in Path(first).parent.iterdir()) == [Path(first).name, Path(first).name + ".lock"]


def test_another_file_at_the_same_path_is_another_model(tmp_path: Path, gguf: Path, converter: Fake) -> None:
    converter('mkdir "$folder"')
    first = hf_folder.find(model(gguf), tmp_path, quiet)
    gguf.write_bytes(b"GGUF other and longer")
    assert hf_folder.find(model(gguf), tmp_path, quiet) != first


def test_a_conversion_that_fails_says_why_and_leaves_no_folder(tmp_path: Path, gguf: Path, converter: Fake) -> None:
    converter('mkdir "$folder"; echo "SHARE 0.5"; echo "ValueError: this architecture is unknown" >&2; exit 1')
    with pytest.raises(EngineFailed, match="this architecture is unknown"):
        hf_folder.find(model(gguf), tmp_path / "data", quiet)
    converter('mkdir "$folder"')
    assert Path(hf_folder.find(model(gguf), tmp_path / "data", quiet)).is_dir()


def test_whoever_stops_waiting_stops_the_conversion(tmp_path: Path, gguf: Path, converter: Fake) -> None:
    converter('echo $$ > "$(dirname "$0")/pid"; echo SHARE 0.5; exec sleep 60')

    def give_up(what: str, share: float) -> None:
        if share:
            raise EngineFailed("the engine was closed while it loaded")

    with pytest.raises(EngineFailed, match="closed"):
        hf_folder.find(model(gguf), tmp_path / "data", give_up)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
