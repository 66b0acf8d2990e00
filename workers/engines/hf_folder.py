"""Where a Hugging Face model is: on disk, on the hub, or made here, once, from a GGUF file.

What is made stays in the data folder. Replicas that start together wait for the one that makes it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from msgspec import structs

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import WeightsModel
from headrace.workers.engines import model_files, object_store

Progress = Callable[[str, float], None]


def find(model: WeightsModel, data_dir: str | Path, progress: Progress) -> str:
    """The model's folder, or its id on the hub; blocks while it is downloaded or made.

    `progress` and errors as in `model_files.find`. What the hub's own library downloads goes into the data folder too,
    unless `HF_HOME` says otherwise.
    """
    if model.hub is not None:
        os.environ.setdefault("HF_HOME", str(Path(data_dir).absolute() / "huggingface"))
        return model.hub
    if model.uri is not None:
        model = structs.replace(model, uri=None, path=str(object_store.fetch(model.uri, data_dir, progress)))
    if model.path is not None and Path(model.path).expanduser().is_dir():
        return str(_check_folder(Path(model.path).expanduser()))
    gguf = model_files.find(model, data_dir, progress)
    folder = Path(data_dir) / "models" / f"{_fingerprint(model, gguf)}-{gguf.stem.removeprefix(_sha(model))}-hf"
    try:
        with model_files.lock(folder, progress, "converting"):
            if not folder.is_dir():
                _make(gguf, folder, progress)
    except OSError as error:
        raise ConfigError(f"data_dir: {folder.parent} cannot be used: {error}") from error
    return str(folder)


def _check_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"models[].path: {folder} is no Hugging Face model: it has no config.json")
    return folder


def _sha(model: WeightsModel) -> str:
    return "" if model.source is None else model.source.sha256[:12] + "-"


def _fingerprint(model: WeightsModel, gguf: Path) -> str:
    """Of a file that has no checksum in the settings: another file at its path is another model."""
    if model.source is not None:
        return model.source.sha256[:12]
    stat = gguf.stat()
    return hashlib.sha256(f"{gguf.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]


def _make(gguf: Path, folder: Path, progress: Progress) -> None:
    """In a process of its own: what it has loaded is not wanted after it, and it can be stopped."""
    part, log = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".log")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "headrace.workers.engines.hf_convert", str(gguf.absolute()), str(part.absolute())]
    with log.open("wb") as out:
        convert = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            while convert.poll() is None:
                progress("converting", _share(log))
                with suppress(subprocess.TimeoutExpired):
                    convert.wait(model_files.POLL_S)
        finally:
            convert.kill()
            convert.wait()
    if convert.returncode != 0:
        raise EngineFailed(f"{gguf} cannot be made into a Hugging Face folder: {_reason(log)}")
    part.replace(folder)
    log.unlink()


def _share(log: Path) -> float:
    shares = [line.split()[1] for line in _lines(log) if line.startswith("SHARE ")]
    return float(shares[-1]) if shares else 0.0


def _reason(log: Path) -> str:
    lines = [line for line in _lines(log) if not line.startswith("SHARE ")]
    return (lines or ["it says nothing"])[-1][:300]


def _lines(log: Path) -> list[str]:
    return [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
