"""LoRA adapters on vLLM: known by their names at start, loaded when a first request names one.

vLLM itself keeps as many as it has room for, and drops the one that was used least lately.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import Adapter, VllmModel

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM makes room for: the next of these."""


class Adapters:
    """The adapters of one loaded model. A broken one is found at start: in the engine core it would end that."""

    def __init__(self, model: VllmModel) -> None:
        self._requests: dict[str, LoRARequest] = {}
        self._rank = 0
        for number, adapter in enumerate(model.adapters, 1):
            folder = get_adapter_absolute_path(adapter.path or adapter.hub)
            self._rank = max(self._rank, _rank(model, adapter, Path(folder)))
            self._requests[adapter.name] = LoRARequest(adapter.name, number, folder)
        self._most = min(model.adapters_loaded, len(self._requests))
        if current_platform.is_cpu():
            # There vLLM takes the last slot's adapter for a request without one that shares a batch with one that has
            # (it indexes with -1). With one slot more than there are adapters the last stays empty.
            self._most = len(self._requests) + 1
        self._tried: dict[str, asyncio.Task[bool]] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """For the engine core."""
        if not self._requests:
            return {}
        rank = next(each for each in _RANKS if each >= self._rank)
        return {"enable_lora": True, "max_loras": self._most, "max_lora_rank": rank}

    async def request(self, llm: AsyncLLM, name: str) -> LoRARequest | None:
        """What a request for this model is sent with; the first one for an adapter loads it. None is the base."""
        if (lora := self._requests.get(name)) is None:
            return None
        task = self._tried.get(name) or asyncio.ensure_future(llm.add_lora(lora))
        self._tried[name] = task
        try:
            await asyncio.shield(task)
        except Exception as error:
            del self._tried[name]
            raise EngineFailed(f"the adapter {name!r} cannot be loaded") from error
        return lora


def _rank(model: VllmModel, adapter: Adapter, folder: Path) -> int:
    """Of an adapter in PEFT's layout; raises ConfigError if it is none, or none for vLLM."""
    where = f"models: {model.name}: adapter {adapter.name}"
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_text("utf-8"))["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}: {folder} has no adapter_config.json of a LoRA adapter") from error
    if not 1 <= rank <= _RANKS[-1]:
        raise ConfigError(f"{where}: its rank is {rank}; vLLM takes 1 to {_RANKS[-1]}")
    if not any((folder / name).exists() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise ConfigError(f"{where}: {folder} has no weights")
    return rank
