"""Starts vLLM's engine core for a model; importing this module takes seconds."""

from __future__ import annotations

import os
from typing import NamedTuple

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.models import VllmModel
from headrace.workers.engines.vllm_plugin import REPLICA_PID

# Before vLLM is imported: some of these are read then, and all are inherited by its processes.
os.environ[REPLICA_PID] = str(os.getpid())
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Capabilities, Details
from headrace.workers.engines.vllm_adapters import Adapters
from headrace.workers.engines.vllm_requests import Requests
from headrace.workers.engines.vllm_stats import EngineStats


class Loaded(NamedTuple):
    """What there is between `load` and `close`."""

    llm: AsyncLLM
    adapters: Adapters
    vocab: HfVocab
    template: ChatTemplate | None
    requests: Requests
    stats: EngineStats


def start(model: VllmModel, folder: str) -> Loaded:
    """Blocks until the weights are loaded. The engine core ends with the thread that calls this."""
    if current_platform.is_cpu():
        _prepare_cpu(model)
    adapters = Adapters(model)
    try:
        llm = AsyncLLM.from_engine_args(_arguments(model, folder, adapters), stat_loggers=[EngineStats])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"models: {model.name}: vLLM refuses this: {' '.join(str(error).split())[:500]}") from error
    except RuntimeError as error:
        raise EngineFailed(f"vLLM cannot load {folder}: {' '.join(str(error).split())[:300]}") from error
    try:
        return _loaded(model, llm, adapters)
    except BaseException:
        llm.shutdown(timeout=2.0)
        raise


def _arguments(model: VllmModel, folder: str, adapters: Adapters) -> AsyncEngineArgs:
    arguments = {
        name: value
        for name in model.arguments.__struct_fields__
        if (value := getattr(model.arguments, name)) is not None
    }
    return AsyncEngineArgs(
        model=folder,
        revision=model.revision,
        served_model_name=model.name,
        max_num_seqs=model.slots,
        max_model_len=model.context_tokens,
        tensor_parallel_size=model.tensor_parallel,
        pipeline_parallel_size=model.pipeline_parallel,
        # On one node the replica holds all GPUs; on several, Ray has a bundle for each rank (cluster/placement.py).
        distributed_executor_backend="mp" if model.ranks == 1 or model.layout == "STRICT_PACK" else "ray",
        reasoning_parser=model.reasoning_parser or "",
        disable_log_stats=True,
        enable_log_requests=False,
        **arguments,
        **adapters.arguments,
    )


def _prepare_cpu(model: VllmModel) -> None:
    if model.threads:
        # Pinned to cores, as it is by default, two replicas on one machine would share the same ones.
        os.environ["OMP_NUM_THREADS"] = str(model.threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if model.arguments.enforce_eager:
        # The sampler would still be compiled, at the first request with log-probabilities, for twenty seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def _loaded(model: VllmModel, llm: AsyncLLM, adapters: Adapters) -> Loaded:
    tokenizer, config = llm.get_tokenizer(), llm.model_config
    ends = config.try_get_generation_config().get("eos_token_id") or []
    ends = {*([ends] if isinstance(ends, int) else ends), tokenizer.eos_token_id} - {None}
    vocab = HfVocab(tokenizer, config.get_vocab_size(), ends)
    template = vocab.chat_template(model)
    try:
        requests = Requests(model, llm, vocab, template)
    except TypeError as error:
        raise ConfigError(f"models: {model.name}: {error}") from error
    [stats] = [each for each in llm.logger_manager.stat_loggers if isinstance(each, EngineStats)]
    return Loaded(llm, adapters, vocab, template, requests, stats)


def capabilities(model: VllmModel, loaded: Loaded) -> Capabilities:
    """What a loaded model is and can do, for the registry."""
    config, template = loaded.llm.model_config, loaded.template
    cache, scheduler = loaded.llm.vllm_config.cache_config, loaded.llm.vllm_config.scheduler_config
    return Capabilities(
        slots=model.slots,
        context_tokens=config.max_model_len,
        tools=loaded.requests.knows_tools,
        constraints=("json", "grammar", "regex"),
        reasoning=model.reasoning_parser is not None,
        details=Details(
            format="safetensors",
            family=str(config.hf_config.model_type),
            quantization=model.arguments.quantization or str(config.dtype).removeprefix("torch."),
            context_tokens=int(getattr(config.hf_config, "max_position_embeddings", 0)),
            vocabulary=len(loaded.vocab.tokens),
            bos=loaded.vocab.bos,
            eos=loaded.vocab.eos,
            chat_template=template.source if template is not None else "",
            digest=model.source.sha256 if model.source is not None else "",
        ),
        step_tokens=int(scheduler.max_num_batched_tokens or 0),
        kv_tokens=int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0),
    )
