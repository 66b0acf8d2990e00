"""Weights in an object store: fetched once into the data folder, and kept as long as the store has the same.

`s3://bucket/key` and `gs://bucket/key` (through its S3 API) are read with boto3, which finds endpoint, region and
credentials as it always does; `https://` is one file. A key that is no object is a folder: all objects below it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.workers.engines.model_files import Progress, lock

_CHUNK = 1 << 20
_TIMEOUT_S = 30.0
_GOOGLE = "https://storage.googleapis.com"


class Item(NamedTuple):
    """An object: its name below the folder, its size in bytes (0 if that is not told), and what changes with it."""

    name: str
    size: int
    tag: str


class Store(Protocol):
    """Where a URI leads."""

    def items(self) -> list[Item]: ...

    def read(self, item: Item) -> Iterator[bytes]: ...


def fetch(uri: str, data_dir: str | Path, progress: Progress) -> Path:
    """The file or folder of a URI, here; blocks while it is downloaded. `progress` as in `model_files.find`.

    What was fetched is used without asking if the store cannot be reached. Raises EngineFailed if nothing was, and
    ConfigError if there is nothing at the URI.
    """
    name = PurePosixPath(urlsplit(uri).path).name or "model"
    place = Path(data_dir) / "models" / f"{hashlib.sha256(uri.encode()).hexdigest()[:12]}-{name}"
    with lock(place, progress):
        marker = place.with_name(place.name + ".fetched")
        known = marker.read_text("utf-8") if marker.is_file() and place.exists() else ""
        store = _store(uri)
        try:
            items = store.items()
        except OSError as error:
            if known:
                return place
            raise EngineFailed(f"{uri} cannot be reached: {error}") from error
        if not items:
            raise ConfigError(f"models[].uri: there is nothing at {uri}")
        said = msgspec.json.encode(items).decode()
        if said != known:
            _fetch_all(store, items, place, progress)
            marker.write_text(said, "utf-8")
    return place


def _fetch_all(store: Store, items: list[Item], place: Path, progress: Progress) -> None:
    part = place.with_name(place.name + ".part")
    _remove(part)
    total, done = max(1, sum(item.size for item in items)), 0
    for item in items:
        file = part / item.name if item.name else part
        if ".." in PurePosixPath(item.name).parts:
            raise ConfigError(f"models[].uri: an object is called {item.name!r}")
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("wb") as out:
                for chunk in store.read(item):
                    out.write(chunk)
                    done += len(chunk)
                    progress("downloading", min(1.0, done / total))
        except OSError as error:
            raise EngineFailed(f"{item.name or place.name} cannot be downloaded: {error}") from error
    _remove(place)
    part.replace(place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _store(uri: str) -> Store:
    return _Web(uri) if uri.startswith(("https://", "http://")) else _Bucket(uri)


class _Web:
    """One file. A server that tells no tag is asked for its date and size."""

    def __init__(self, url: str) -> None:
        self._url = url

    def items(self) -> list[Item]:
        with _web_errors():
            answer = httpx.head(self._url, follow_redirects=True, timeout=_TIMEOUT_S)
        if answer.status_code in (404, 410):
            return []
        if not answer.is_success:
            raise OSError(f"it answers {answer.status_code}")
        size = int(answer.headers.get("content-length", 0))
        return [Item("", size, answer.headers.get("etag") or answer.headers.get("last-modified", ""))]

    def read(self, item: Item) -> Iterator[bytes]:
        with _web_errors(), httpx.stream("GET", self._url, follow_redirects=True, timeout=_TIMEOUT_S) as answer:
            if not answer.is_success:
                raise OSError(f"it answers {answer.status_code}")
            yield from answer.iter_raw(_CHUNK)


@contextmanager
def _web_errors() -> Iterator[None]:
    """What httpx raises as OSError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise OSError(str(error) or type(error).__name__) from error


class _Bucket:
    """An object, or all below a key, of an S3 store."""

    def __init__(self, uri: str) -> None:
        try:
            import boto3
            from botocore.exceptions import BotoCoreError, ClientError
        except ImportError as error:
            raise ConfigError(f"models[].uri: {uri} needs boto3: install headrace[s3]") from error
        self._errors: tuple[type[Exception], ...] = (BotoCoreError, ClientError)
        parts = urlsplit(uri)
        self._bucket, self._key = parts.netloc, parts.path.strip("/")
        self._client: Any = boto3.client("s3", **({"endpoint_url": _GOOGLE} if parts.scheme == "gs" else {}))

    def items(self) -> list[Item]:
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._key)
            found = [each for page in pages for each in page.get("Contents", ())]
        except self._errors as error:
            raise OSError(str(error)) from error
        below = self._key + "/" if self._key else ""
        if own := [each for each in found if each["Key"] == self._key]:
            return [Item("", own[0]["Size"], own[0]["ETag"])]
        return [
            Item(each["Key"].removeprefix(below), each["Size"], each["ETag"])
            for each in found
            if each["Key"].startswith(below) and not each["Key"].endswith("/")
        ]

    def read(self, item: Item) -> Iterator[bytes]:
        key = "/".join(part for part in (self._key, item.name) if part)
        try:
            with closing(self._client.get_object(Bucket=self._bucket, Key=key)["Body"]) as body:
                yield from body.iter_chunks(_CHUNK)
        except self._errors as error:
            raise OSError(str(error)) from error
