"""How a llama.cpp engine is loaded and closed, and what it says when it cannot load."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.workers.engines.llamacpp import LlamacppEngine
from tests.workers.llamacpp_runs import DATA_DIR, NEVER_ENDS, STORY, begin, default_model, encoded


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The only temporary folder there is; a socket's path must be shorter than what `tmp_path` gives."""
    with tempfile.TemporaryDirectory(prefix="hr") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


def slot_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("llamacpp_")}


async def test_close_ends_what_runs_and_what_waits_and_leaves_no_socket(short_folder: str) -> None:
    before = slot_threads()
    engine = LlamacppEngine(default_model(), DATA_DIR)
    await engine.load(lambda what, share: None)
    streams = [await begin(engine, STORY, None, sampling=NEVER_ENDS) for _ in range(3)]
    await streams[0].until(lambda: streams[0].ids)
    begun = time.monotonic()
    await engine.close()
    assert time.monotonic() - begun < 5
    assert slot_threads() == before
    counts = [len(stream.steps) for stream in streams]
    await engine.close()
    assert [len(stream.steps) for stream in streams] == counts
    assert [stream.errors for stream in streams] == [[], [], []]
    assert os.listdir(short_folder) == []
    for use in (engine.check_health(), encoded(engine, STORY)):
        with pytest.raises(EngineFailed, match="closed"):
            await use


async def test_closing_while_it_loads_ends_the_load() -> None:
    engine = LlamacppEngine(default_model(), DATA_DIR)
    is_loading = asyncio.Event()
    load = asyncio.create_task(engine.load(lambda what, share: is_loading.set()))
    await asyncio.wait_for(is_loading.wait(), 20)
    await engine.close()
    with pytest.raises(EngineFailed, match="closed"):
        await load


async def test_an_engine_that_is_not_loaded_is_not_healthy() -> None:
    engine = LlamacppEngine(default_model(), DATA_DIR)
    with pytest.raises(EngineFailed, match="not loaded"):
        await engine.check_health()
    await engine.close()


async def test_more_context_than_the_model_was_made_for_is_a_configuration_error() -> None:
    engine = LlamacppEngine(msgspec.structs.replace(default_model(), context_tokens=8193, slots=1), DATA_DIR)
    with pytest.raises(ConfigError, match="context_tokens is 8193, but the model was made for 8192"):
        await engine.load(lambda what, share: None)
    await engine.close()


async def test_a_file_that_only_begins_like_a_model_fails_to_load(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" * 100)
    engine = LlamacppEngine(msgspec.structs.replace(default_model(), source=None, path=str(file)), DATA_DIR)
    with pytest.raises(EngineFailed, match="cannot load"):
        await engine.load(lambda what, share: None)
    await engine.close()
