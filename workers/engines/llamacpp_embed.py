"""Embeddings: a second context of llama.cpp on the same weights, since a whole input must fit into one of its steps."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xllamacpp
from msgspec import Struct

from headrace.broker.errors import EngineFailed
from headrace.broker.models import LlamacppModel
from headrace.workers.engines.llamacpp_server import open_server

_EUCLIDEAN = 2  # llama.cpp's word for vectors of length 1


class _Vector(Struct, frozen=True):
    embedding: str


class _Usage(Struct, frozen=True):
    prompt_tokens: int = 0


class _Answer(Struct, frozen=True):
    data: list[_Vector] = []
    usage: _Usage = _Usage()
    error: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Answer)


class Embedder:
    """Makes the vectors on one thread, in order, an input at a time; what is not wanted any more stops between two."""

    def __init__(self, model: LlamacppModel, path: Path, folder: Path) -> None:
        def prepare(params: Any) -> None:
            params.embedding = True
            params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
            params.embd_normalize = _EUCLIDEAN
            params.n_parallel = 1
            params.n_ctx = params.n_batch = params.n_ubatch = model.context_tokens

        self._server: Any = open_server(model, path, folder, prepare)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llamacpp-embed")

    async def vectors(self, inputs: list[list[int]], advance: Callable[[], None]) -> list[bytes]:
        """The mean-pooled vector of each input, scaled to length 1, as little-endian float32."""
        loop = asyncio.get_running_loop()
        vectors = []
        for ids in inputs:
            vectors.append(await loop.run_in_executor(self._thread, self._vector, ids))
            advance()
        return vectors

    def _vector(self, ids: list[int]) -> bytes:
        body = {"input": [ids], "encoding_format": "base64"}
        answer = _decoder.decode(self._server.handle_embeddings(msgspec.json.encode(body)))
        if answer.error is not None or len(answer.data) != 1:
            raise EngineFailed(f"llama.cpp made no embedding: {answer.error}")
        return base64.b64decode(answer.data[0].embedding)

    def join(self) -> None:
        """Block until no thread is inside llama.cpp."""
        self._thread.shutdown(wait=True, cancel_futures=True)
