"""Weights in an object store: a file or a folder, fetched once, and again only if the store has others."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import LlamacppModel, VllmModel
from headrace.workers.engines import hf_folder, model_files, object_store
from tests.infra.tools import missing

GGUF = b"GGUF" + b"weights" * 1000


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket `weights` in a simulated S3, whose credentials and address are where boto3 looks for them."""
    try:
        import boto3
        from moto.server import ThreadedMotoServer
    except ImportError:
        missing("moto's server (pip install moto flask flask-cors)")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="weights")
    yield client
    server.stop()


def told(what: str, share: float) -> None:
    assert 0 <= share <= 1


def test_a_folder_is_fetched_whole_and_again_if_it_has_changed(s3: Any, tmp_path: Path) -> None:
    for name, data in {"m/config.json": b"{}", "m/sub/part-1": b"1" * 3_000_000, "m2/other": b"no"}.items():
        s3.put_object(Bucket="weights", Key=name, Body=data)
    model = VllmModel(name="m", uri="s3://weights/m")
    folder = Path(hf_folder.find(model, tmp_path, told))
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        "config.json", "sub/part-1",
    }  # fmt: skip
    assert (folder / "sub/part-1").read_bytes() == b"1" * 3_000_000

    (folder / "config.json").write_text("kept")
    assert Path(hf_folder.find(model, tmp_path, told)) == folder
    assert (folder / "config.json").read_text() == "kept"  # the store has the same as before
    s3.put_object(Bucket="weights", Key="m/config.json", Body=b'{"new": 1}')
    s3.delete_object(Bucket="weights", Key="m/sub/part-1")
    hf_folder.find(model, tmp_path, told)
    assert [file.name for file in folder.rglob("*")] == ["config.json"]


def test_a_file_is_fetched_and_checked(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="weights", Key="deep/tiny.gguf", Body=GGUF)
    s3.put_object(Bucket="weights", Key="deep/tiny.gguf.txt", Body=b"not that one")
    found = model_files.find(LlamacppModel(name="m", uri="s3://weights/deep/tiny.gguf"), tmp_path, told)
    assert found.read_bytes() == GGUF
    with pytest.raises(ConfigError, match="not a GGUF file"):
        model_files.find(LlamacppModel(name="m", uri="s3://weights/deep/tiny.gguf.txt"), tmp_path, told)
    with pytest.raises(ConfigError, match="there is nothing at s3://weights/none"):
        object_store.fetch("s3://weights/none", tmp_path, told)


def test_what_is_there_is_used_while_the_store_is_away(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_object(Bucket="weights", Key="tiny.gguf", Body=GGUF)
    found = object_store.fetch("s3://weights/tiny.gguf", tmp_path, told)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert object_store.fetch("s3://weights/tiny.gguf", tmp_path, told) == found
    with pytest.raises(EngineFailed, match="cannot be reached"):
        object_store.fetch("s3://weights/other.gguf", tmp_path, told)


class Files(BaseHTTPRequestHandler):
    """One file at `/tiny.gguf`."""

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(GGUF)

    def _answer(self, body: bytes) -> None:
        if self.path != "/tiny.gguf":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("content-length", str(len(GGUF)))
        self.send_header("etag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_file_of_a_web_server(tmp_path: Path) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Files) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert object_store.fetch(f"{url}/tiny.gguf", tmp_path, told).read_bytes() == GGUF
        with pytest.raises(ConfigError, match="there is nothing"):
            object_store.fetch(f"{url}/none.gguf", tmp_path, told)
        server.shutdown()
        thread.join()
