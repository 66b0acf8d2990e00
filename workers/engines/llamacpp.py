"""GGUF models on llama.cpp, inside this process.

Read on in `model_files.py` (where the file is), `chat_template.py` and `gguf_vocab.py` (words to token ids),
`llamacpp_wire.py` (a generation as a request, chunks as steps) and `llamacpp_slots.py` (threads).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.broker.errors import BadRequest, ConfigError, ContextLengthExceeded, EngineFailed
from headrace.broker.messages import Batch, Chat, Job, Prompt, Result, Text, Tokens
from headrace.broker.settings import LlamacppModel
from headrace.workers.engines import model_files
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_server import open_server, warm_up
from headrace.workers.engines.llamacpp_slots import Sequence, Slots
from headrace.workers.engines.llamacpp_wire import StreamReader, request_body, tokens_left
from headrace.workers.engines.protocol import Capabilities, Generation, Run, Step, Token


class _Loaded(NamedTuple):
    """What there is between `load` and `close`."""

    server: Any
    vocab: GgufVocab
    template: ChatTemplate | None
    slots: Slots


class LlamacppEngine:
    """An `Engine` (see `protocol.py`). What blocks is done on one thread of its own, in order."""

    def __init__(self, model: LlamacppModel, data_dir: str) -> None:
        self.capabilities = Capabilities(slots=model.slots, context_tokens=model.context_tokens)
        self._model = model
        self._data_dir = data_dir
        self._side = ThreadPoolExecutor(1, thread_name_prefix="llamacpp-side")
        self._loaded: _Loaded | None = None
        self._is_closed = False

    async def load(self, progress: Callable[[str, float], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(what: str, share: float) -> None:
            if self._is_closed:
                raise EngineFailed("the engine was closed while it loaded")
            loop.call_soon_threadsafe(progress, what, share)

        await loop.run_in_executor(self._side, self._load, tell, loop)

    def _load(self, tell: Callable[[str, float], None], loop: asyncio.AbstractEventLoop) -> None:
        path = model_files.find(self._model, self._data_dir, tell)
        tell("loading", 0.0)
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            # The listener keeps its open socket; nobody needs the name of it.
            server = open_server(self._model, path, Path(folder))
        # After the server, which has silenced llama.cpp's log by now.
        vocab = GgufVocab(path)
        self._check_context(vocab)
        tell("warming up", 0.0)
        warm_up(server, vocab)
        slots = Slots(server.handle_completions, self._model.slots, loop)
        self._loaded = _Loaded(server, vocab, self._chat_template(vocab), slots)
        tell("ready", 1.0)

    def _check_context(self, vocab: GgufVocab) -> None:
        wanted = self._model.context_tokens
        if 0 < vocab.context_tokens < wanted:
            raise ConfigError(
                f"models: {self._model.name}: context_tokens is {wanted}, "
                f"but the model was made for {vocab.context_tokens}"
            )

    def _chat_template(self, vocab: GgufVocab) -> ChatTemplate | None:
        if vocab.template is None:
            return None
        bos, eos = vocab.text(vocab.bos_id), vocab.text(vocab.eos_id)
        return ChatTemplate(vocab.template, vocab.special_texts, bos=bos, eos=eos, system=self._model.system)

    async def encode(self, job: Job) -> list[int]:
        loaded, prompt = self._ready(), job.prompt
        ids = await asyncio.get_running_loop().run_in_executor(self._side, _encode, loaded, prompt)
        param = "messages" if isinstance(prompt, Chat) else "prompt"
        if not ids:
            raise BadRequest("the prompt is empty", param=param)
        if len(ids) >= self.capabilities.context_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.capabilities.context_tokens} tokens, "
                f"but the prompt has {len(ids)} tokens.",
                param=param,
            )
        return ids

    def can_continue(self, job: Job) -> bool:
        return True

    def token(self, token_id: int) -> Token:
        return self._ready().vocab.tokens[token_id]

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        loaded = self._ready()
        left = tokens_left(generation, self.capabilities.context_tokens)
        body = request_body(generation, self.capabilities.context_tokens)
        reader = StreamReader(loaded.vocab, left, generation.job.logprobs)
        sequence = Sequence(msgspec.json.encode(body), reader, emit, fail)
        if left:
            loaded.slots.start(sequence)
        else:
            asyncio.get_running_loop().call_soon(sequence.give, Step((), end="limit"))
        return sequence

    async def answer(self, job: Job) -> tuple[Result, int]:
        raise BadRequest(f"this model cannot {job.kind}")

    async def check_health(self) -> None:
        self._ready()

    async def close(self) -> None:
        """End everything, in the one order that does not crash; safe to repeat, and while it loads."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loaded is not None:
            self._loaded.slots.cancel_all()
        await asyncio.get_running_loop().run_in_executor(self._side, self._destroy)
        self._side.shutdown(wait=False)

    def _destroy(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.slots.join()
            loaded.vocab.close()

    def _ready(self) -> _Loaded:
        if self._loaded is None or self._is_closed:
            raise EngineFailed("the engine is closed" if self._is_closed else "the engine is not loaded")
        return self._loaded


def _encode(loaded: _Loaded, prompt: Prompt) -> list[int]:
    """Only a conversation has words of a user among words of ours; a plain text may name any token it likes."""
    match prompt:
        case Tokens(token_ids):
            if any(not 0 <= i < len(loaded.vocab.tokens) for i in token_ids):
                raise BadRequest("the prompt has token ids that the model does not know", param="prompt")
            return list(token_ids)
        case Text(text):
            ids = loaded.vocab.tokenize(text, parse_special=True)
            return loaded.vocab.with_bos(ids) if text else []
        case Chat(messages):
            if loaded.template is None:
                raise BadRequest("this model has no chat template; give it a plain prompt", param="messages")
            pieces = loaded.template.render(messages)
            return loaded.vocab.with_bos(
                [i for piece in pieces for i in loaded.vocab.tokenize(piece, parse_special=True)]
            )
        case Batch():
            raise BadRequest("one prompt at a time", param="prompt")
