"""LoRA adapters on llama.cpp: a request gets the one that it names, and no other request hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from headrace.broker.errors import ConfigError
from headrace.broker.messages import Job
from headrace.broker.models import Adapter
from headrace.workers.engines.llamacpp import LlamacppEngine
from headrace.workers.engines.protocol import Generation
from tests.workers.llamacpp_runs import DATA_DIR, GREEDY, STORY, Stream, default_model
from tests.workers.lora_files import write_gguf

TOKENS = 12


async def made(engine: LlamacppEngine, model: str) -> list[int]:
    job = Job("job", model, STORY, TOKENS, sampling=GREEDY, ignore_eos=True)
    stream = Stream(engine, Generation(job, await engine.encode(job), [], TOKENS))
    await stream.until(lambda: stream.end is not None, 60)
    return stream.ids


async def test_who_names_an_adapter_gets_it_and_nobody_else_does(tmp_path: Path) -> None:
    adapters = [
        Adapter("nothing", str(write_gguf(tmp_path / "nothing.gguf", 0.0))),
        Adapter("loud", str(write_gguf(tmp_path / "loud.gguf", 0.05))),
    ]
    model = msgspec.structs.replace(default_model(), adapters=adapters)
    engine = LlamacppEngine(model, DATA_DIR)
    await engine.load(lambda what, share: None)
    try:
        base = await made(engine, model.name)
        loud = await made(engine, "loud")
        assert loud != base
        assert await made(engine, "nothing") == base
        assert list(await asyncio.gather(made(engine, "loud"), made(engine, model.name))) == [loud, base]
    finally:
        await engine.close()


async def test_an_adapter_that_is_not_there_is_named(tmp_path: Path) -> None:
    adapters = [Adapter("gone", str(tmp_path / "gone.gguf"))]
    engine = LlamacppEngine(msgspec.structs.replace(default_model(), adapters=adapters), DATA_DIR)
    with pytest.raises(ConfigError, match="adapter gone"):
        await engine.load(lambda what, share: None)
    await engine.close()
