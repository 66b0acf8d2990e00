"""Starts llama.cpp's server inside this process, and proves that it makes tokens."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import xllamacpp

from headrace.broker.errors import ConfigError, EngineFailed
from headrace.broker.messages import Job, Sampling, Tokens
from headrace.broker.models import Adapter, LlamacppModel
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_wire import StreamReader, request_body
from headrace.workers.engines.protocol import Generation

WARM_UP_TOKENS = 4


def open_server(
    model: LlamacppModel, path: Path, folder: Path, prepare: Callable[[Any], None] = lambda params: None
) -> Any:
    """Load the weights; blocks, and holds the interpreter's lock for as long. `prepare` changes the parameters last.

    Its HTTP listener cannot be turned off: it gets a socket in `folder` and a key that nobody knows.
    """
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_parallel = model.slots
    params.n_ctx = model.slots * model.context_tokens
    # A shared pool fails every running sequence when one of them fills it.
    params.kv_unified = False
    params.n_batch = params.n_ubatch = model.batch_tokens
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = model.threads
    params.n_gpu_layers = model.gpu_layers
    params.ctx_shift = False
    params.fit_params = False
    params.cache_ram_mib = 0
    params.verbosity = -1
    params.ui = params.endpoint_slots = False
    params.endpoint_metrics = True  # how many steps it has made is nowhere else
    params.n_threads_http = 1
    params.hostnames = [str(folder / "llamacpp.sock")]
    params.api_keys = [secrets.token_hex(16)]
    params.lora_adapters = [_adapter(each) for each in model.adapters]
    prepare(params)
    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise EngineFailed(f"llama.cpp cannot load {path} (a broken file, or too little memory)") from error


def _adapter(adapter: Adapter) -> Any:
    if not Path(str(adapter.path)).is_file():
        raise ConfigError(f"models: adapter {adapter.name}: {adapter.path} is not a file")
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = str(adapter.path), 1.0
    return info


def warm_up(server: Any, vocab: GgufVocab) -> None:
    """Make a few tokens; raises EngineFailed if they do not come, or not in the shape that this engine reads."""
    ids = vocab.with_bos(vocab.tokenize("Once upon a time", parse_special=False))
    job = Job("", "", Tokens(ids), WARM_UP_TOKENS, sampling=Sampling(temperature=0), logprobs=1)
    generation = Generation(job, ids, [], WARM_UP_TOKENS)
    body = request_body(generation, len(ids) + WARM_UP_TOKENS)
    chunks: list[bytes] = []
    server.handle_completions(msgspec.json.encode(body), chunks.append)
    reader = StreamReader(vocab, WARM_UP_TOKENS, 1)
    for chunk in chunks:
        step = reader.read(chunk)
        if step is not None and step.end is not None:
            return
    raise EngineFailed("llama.cpp made no tokens when it was tried")


def decoded_steps(metrics: bytes | str) -> int:
    """How often llama.cpp has decoded, from what its server says in Prometheus's form; 0 if it does not."""
    text = metrics.decode() if isinstance(metrics, bytes) else metrics
    found = re.search(r"^llamacpp:n_decode_total (\S+)$", text, re.M)
    return int(float(found[1])) if found else 0
