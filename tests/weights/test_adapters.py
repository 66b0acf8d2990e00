"""LoRA adapters on vLLM: loaded when a first request names one, and heard by nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.broker.errors import ConfigError
from headrace.broker.messages import Job
from headrace.broker.models import Adapter, VllmModel
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.vllm import VllmEngine
from tests.weights.conftest import model_of
from tests.workers.llamacpp_runs import DATA_DIR, GREEDY, STORY, Stream
from tests.workers.lora_files import write_peft

TOKENS = 12

pytestmark = pytest.mark.asyncio(loop_scope="session")


def engine_with(adapters: list[Adapter], **fields: object) -> VllmEngine:
    model = model_of("vllm", adapters=adapters, **fields)
    assert isinstance(model, VllmModel)
    return VllmEngine(model, DATA_DIR)


async def made(engine: VllmEngine, model: str) -> list[int]:
    job = Job("job", model, STORY, TOKENS, sampling=GREEDY, ignore_eos=True)
    stream = Stream(engine, Generation(job, await engine.encode(job), [], TOKENS))
    await stream.until(lambda: stream.end is not None or stream.errors, 60)
    assert not stream.errors
    return stream.ids


async def test_who_names_an_adapter_gets_it_and_nobody_else_does(tmp_path: Path) -> None:
    scales = {"nothing": 0.0, "loud": 0.05, "louder": 0.1}
    adapters = [Adapter(name, str(write_peft(tmp_path / name, scale))) for name, scale in scales.items()]
    engine = engine_with(adapters, adapters_loaded=1)
    await engine.load(lambda what, share: None)
    try:
        base, loud = await made(engine, "base"), await made(engine, "loud")
        assert loud != base
        assert await made(engine, "nothing") == base
        assert await made(engine, "louder") not in (base, loud)
        for _ in range(2):  # in one batch numbers are rounded otherwise, so that an adapter's answer may branch
            names = ("loud", "base", "louder", "base")
            loud, first, louder, second = await asyncio.gather(*(made(engine, name) for name in names))
            assert first == second == base
            assert loud != base != louder
    finally:
        await engine.close()


@pytest.mark.parametrize("config", [None, "{}", '{"r": 4096}'])
async def test_what_is_no_adapter_is_named_before_the_weights_are_loaded(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config)
    engine = engine_with([Adapter("broken", str(tmp_path))])
    with pytest.raises(ConfigError, match="adapter broken"):
        await engine.load(lambda what, share: None)
    await engine.close()
