"""Where a model's GGUF file is: on disk, in an installed package, or in a wheel on the Python index.

A wheel is fetched with pip, so the index, proxy and certificates that the user has set up for pip hold here too. What
was fetched stays in the data folder under its checksum, and replicas that start together wait for one download.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path, PurePosixPath

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import LlamacppModel, WeightsModel, WheelFile

Progress = Callable[[str, float], None]

POLL_S = 0.2
WITHOUT_NETWORK = "Without a network, bring a GGUF file onto this machine and set models[].path to it"


def find(model: LlamacppModel | WeightsModel, data_dir: str | Path, progress: Progress) -> Path:
    """The model's GGUF file, checked; blocks while it is downloaded.

    `progress` is called at least every fifth of a second during a wait, and what it raises ends the wait. Raises
    ConfigError for settings that cannot be right, and EngineFailed if the wheel cannot be fetched now.
    """
    if model.path is not None:
        return _check_is_gguf(Path(model.path).expanduser())
    if model.uri is not None:
        from headrace.workers.engines import object_store

        return _check_is_gguf(object_store.fetch(model.uri, data_dir, progress))
    if model.source is None:
        raise ConfigError(f"models: {model.name!r} has neither path nor source")
    source = model.source
    place = Path(data_dir) / "models" / f"{source.sha256[:12]}-{PurePosixPath(source.file).name}"
    try:
        with lock(place, progress):
            return _kept(place, source, progress) or _installed(source, progress) or _fetch(source, place, progress)
    except OSError as error:
        raise ConfigError(f"data_dir: {place.parent} cannot be used: {error}") from error


def _check_is_gguf(path: Path) -> Path:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ConfigError(f"models[].path: {path} cannot be read: {error.strerror}") from error
    if magic != b"GGUF":
        raise ConfigError(f"models[].path: {path} is not a GGUF file")
    return path


@contextmanager
def lock(place: Path, progress: Progress, what: str = "downloading") -> Iterator[None]:
    """Held by one process at a time, and given up by the kernel when that process dies."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_name(place.name + ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress(what, 0.0)
                time.sleep(POLL_S)
        yield


def _kept(place: Path, source: WheelFile, progress: Progress) -> Path | None:
    """The file of an earlier download; it is read again only if it has changed since it was checked."""
    if not place.is_file():
        return None
    marker = _marker(place)
    if marker.is_file() and marker.read_text() == _stamp(place, source):
        return place
    progress("checking", 0.0)
    if _sha256(place) != source.sha256:
        return None
    marker.write_text(_stamp(place, source))
    return place


def _marker(place: Path) -> Path:
    return place.with_name(place.name + ".checked")


def _stamp(path: Path, source: WheelFile) -> str:
    stat = path.stat()
    return f"{source.sha256} {stat.st_size} {stat.st_mtime_ns}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(path: Path, source: WheelFile, progress: Progress) -> None:
    progress("checking", 0.0)
    found = _sha256(path)
    if found != source.sha256:
        raise ConfigError(
            f"models[].source: {source.file} of {source.wheel} {source.version} has the checksum {found}, "
            f"not {source.sha256} as the configuration says"
        )


def _installed(source: WheelFile, progress: Progress) -> Path | None:
    """The file in an installed distribution, which is not imported: its package may want what is not there."""
    try:
        distribution = metadata.distribution(source.wheel)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.file)))
    if distribution.version != source.version or not path.is_file():
        return None
    _check(path, source, progress)
    return path


def _fetch(source: WheelFile, place: Path, progress: Progress) -> Path:
    folder = place.with_name(place.name + ".fetch")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        part = _unpack(_download(source, folder, progress), source, folder)
        _check(part, source, progress)
        _marker(place).write_text(_stamp(part, source))
        part.replace(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return place


def _download(source: WheelFile, folder: Path, progress: Progress) -> Path:
    wanted = f"{source.wheel}=={source.version}"
    log = folder / "pip.log"
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--no-deps",
                "--only-binary=:all:",
                "--no-input",
                "--disable-pip-version-check",
                f"--progress-bar={_bar()}",
                f"--dest={folder}",
                wanted,
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(folder)},
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                progress("downloading", share(log.read_text("utf-8", "replace")))
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_S)
        finally:
            pip.kill()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise EngineFailed(f"pip cannot fetch {wanted}: {_reason(log)}. {WITHOUT_NETWORK}")
    return wheels[0]


def _bar() -> str:
    """pip tells machines how far it is since 24.1; an older one refuses the word."""
    with suppress(metadata.PackageNotFoundError, ValueError):
        major, minor = metadata.version("pip").split(".")[:2]
        return "raw" if (int(major), int(minor)) >= (24, 1) else "off"
    return "off"


def share(log: str) -> float:
    """How far pip is, from 0 to 1, by the last line `Progress <bytes> of <bytes>` of its output."""
    for line in reversed(log.splitlines()):
        match line.split():
            case ["Progress", done, "of", total] if done.isdigit() and total.isdigit() and int(total):
                return min(1.0, int(done) / int(total))
    return 0.0


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it says nothing"])[-1].rstrip(".")


def _unpack(wheel: Path, source: WheelFile, folder: Path) -> Path:
    part = folder / "part"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.file) as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except KeyError as error:
        raise ConfigError(f"models[].source: {wheel.name} has no file {source.file}") from error
    except zipfile.BadZipFile as error:
        raise EngineFailed(f"{wheel.name} is not a whole wheel: {error}. {WITHOUT_NETWORK}") from error
    return part
