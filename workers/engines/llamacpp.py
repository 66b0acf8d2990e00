"""GGUF models on llama.cpp, inside this process.

Read on in `model_files.py` (where the file is), `llamacpp_prompt.py`, `chat_template.py` and `gguf_vocab.py` (a job to
token ids), `llamacpp_wire.py`, `llamacpp_chat.py` and `llamacpp_tools.py` (a generation as a request, chunks as steps),
`llamacpp_grammar.py` (constraints), `llamacpp_answers.py` and `llamacpp_embed.py` (other kinds of jobs) and
`llamacpp_slots.py` (threads).
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headrace.broker.errors import BadRequest, ConfigError, ContextLengthExceeded, EngineFailed
from headrace.broker.messages import Batch, Chat, Job, Result, Text, Tokens
from headrace.broker.models import LlamacppModel
from headrace.workers.engines import llamacpp_answers, llamacpp_tools, model_files
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llamacpp_about import capabilities
from headrace.workers.engines.llamacpp_chat import ChatReader, chat_body
from headrace.workers.engines.llamacpp_embed import Embedder
from headrace.workers.engines.llamacpp_prompt import Plan, Prompts
from headrace.workers.engines.llamacpp_server import decoded_steps, open_server, warm_up
from headrace.workers.engines.llamacpp_slots import Reader, Sequence, Slots
from headrace.workers.engines.llamacpp_wire import StreamReader, request_body, tokens_left
from headrace.workers.engines.protocol import Capabilities, Figures, Generation, Run, Step, Token


class _Loaded(NamedTuple):
    """What there is between `load` and `close`."""

    server: Any
    vocab: GgufVocab
    prompts: Prompts
    slots: Slots
    embedder: Embedder | None


class LlamacppEngine:
    """An `Engine` (see `protocol.py`). What blocks is done on one thread of its own, in order."""

    def __init__(self, model: LlamacppModel, data_dir: str) -> None:
        self.capabilities = Capabilities(slots=model.slots, context_tokens=model.context_tokens)
        self._model = model
        self._adapters = [adapter.name for adapter in model.adapters]
        self._data_dir = data_dir
        self._side = ThreadPoolExecutor(1, thread_name_prefix="llamacpp-side")
        self._loaded: _Loaded | None = None
        self._is_closed = False
        self._is_asking = False
        self._warm_up_steps = 0
        self._steps = 0
        self._step_s = 0.0

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
        override = self._template_file()
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            # The listener keeps its open socket; nobody needs the name of it.
            server = open_server(self._model, path, Path(folder), partial(_use_template, override))
        # After the server, which has silenced llama.cpp's log by now.
        vocab = GgufVocab(path)
        self._check_context(vocab)
        tell("warming up", 0.0)
        warm_up(server, vocab)
        self._warm_up_steps = decoded_steps(server.handle_metrics())
        embedder = self._embedder(path) if self._model.embeddings else None
        prompts = Prompts(vocab, self._chat_template(override or vocab.template, vocab))
        self.capabilities = capabilities(self._model, prompts)
        slots = Slots(server.handle_completions, self._model.slots, loop)
        self._loaded = _Loaded(server, vocab, prompts, slots, embedder)
        tell("ready", 1.0)

    def _check_context(self, vocab: GgufVocab) -> None:
        wanted = self._model.context_tokens
        if 0 < vocab.context_tokens < wanted:
            raise ConfigError(
                f"models: {self._model.name}: context_tokens is {wanted}, "
                f"but the model was made for {vocab.context_tokens}"
            )

    def _template_file(self) -> str | None:
        """The template that the configuration has in place of the model's own."""
        if self._model.chat_template is None:
            return None
        try:
            return Path(self._model.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"models: {self._model.name}: chat_template cannot be read: {error}") from error

    def _chat_template(self, source: str | None, vocab: GgufVocab) -> ChatTemplate | None:
        if source is None:
            return None
        bos, eos = vocab.text(vocab.bos_id), vocab.text(vocab.eos_id)
        return ChatTemplate(source, vocab.special_texts, bos=bos, eos=eos, system=self._model.system)

    def _embedder(self, path: Path) -> Embedder:
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            return Embedder(self._model, path, Path(folder))

    async def encode(self, job: Job) -> list[int]:
        prompts = self._ready().prompts

        def plan_and_encode() -> list[int]:
            prompts.plan(job)
            return prompts.encode(job)

        ids = await asyncio.get_running_loop().run_in_executor(self._side, plan_and_encode)
        self._check_length(ids, "messages" if isinstance(job.prompt, Chat) else "prompt")
        return ids

    def _check_length(self, ids: list[int], param: str) -> None:
        if not ids:
            raise BadRequest("the prompt is empty", param=param)
        if len(ids) >= self.capabilities.context_tokens:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.capabilities.context_tokens} tokens, "
                f"but the prompt has {len(ids)} tokens.",
                param=param,
            )

    def can_continue(self, job: Job) -> bool:
        """Only from tokens to tokens: neither a grammar nor a parser can be set into the middle of an answer."""
        return self._ready().prompts.plan(job).is_exact

    def token(self, token_id: int) -> Token:
        return self._ready().vocab.tokens[token_id]

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        loaded = self._ready()
        left = tokens_left(generation, self.capabilities.context_tokens)
        plan = loaded.prompts.plan(generation.job)
        body, reader = self._request(loaded, generation, plan, left)
        if self._adapters:  # a request that names none would get all of them
            chosen = [float(name == generation.job.model) for name in self._adapters]
            body["lora"] = [{"id": id, "scale": scale} for id, scale in enumerate(chosen)]
        emit = _through(plan, generation.job, loaded.prompts, emit)
        sequence = Sequence(msgspec.json.encode(body), reader, emit, fail)
        if plan.route == "chat":
            sequence.complete = loaded.server.handle_chat_completions
        if left:
            loaded.slots.start(sequence)
        else:
            asyncio.get_running_loop().call_soon(sequence.give, Step((), end="limit"))
        return sequence

    def _request(self, loaded: _Loaded, generation: Generation, plan: Plan, left: int) -> tuple[dict[str, Any], Reader]:
        context, logprobs = self.capabilities.context_tokens, generation.job.logprobs
        template = loaded.prompts.template
        if plan.route == "chat" and template is not None:
            return chat_body(generation, template, context), ChatReader(loaded.vocab, logprobs)
        return request_body(generation, context, plan.grammar), StreamReader(loaded.vocab, left, logprobs)

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        loaded = self._ready()
        if job.kind == "embed":
            return await self._embed(loaded, job, advance)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._side, llamacpp_answers.answer, job, loaded.prompts)

    async def _embed(self, loaded: _Loaded, job: Job, advance: Callable[[], None]) -> tuple[Result, int]:
        if loaded.embedder is None:
            raise BadRequest("this model has no embeddings: its configuration lacks `embeddings: true`", param="model")
        inputs: list[Text | Tokens]
        match job.prompt:
            case Batch(inputs):
                pass
            case Text() | Tokens() as one:
                inputs = [one]
            case Chat():
                raise BadRequest("a conversation has no embedding", param="input")
        prompts, loop = loaded.prompts, asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._side, lambda: [prompts.plain(each, "input") for each in inputs])
        for each in ids:
            self._check_length(each, "input")
        vectors = await loaded.embedder.vectors(ids, advance)
        return Result({"embeddings": vectors, "tokens": list(map(len, ids))}), sum(map(len, ids))

    def figures(self) -> Figures:
        """llama.cpp says its number of steps between two of them: it is asked on the side, and told the next time."""
        if (loaded := self._loaded) is None or self._is_closed:
            return Figures(0)
        if loaded.slots.busy_s != self._step_s and not self._is_asking:
            self._is_asking = True
            self._side.submit(self._ask_steps, loaded)
        room = self._model.slots * self.capabilities.context_tokens
        return Figures(loaded.slots.running, None, self._steps, self._step_s, room)

    def _ask_steps(self, loaded: _Loaded) -> None:
        if self._loaded is loaded:
            self._step_s = loaded.slots.busy_s
            self._steps = decoded_steps(loaded.server.handle_metrics()) - self._warm_up_steps
        self._is_asking = False

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
            if loaded.embedder is not None:
                loaded.embedder.join()
            loaded.vocab.close()

    def _ready(self) -> _Loaded:
        if self._loaded is None or self._is_closed:
            raise EngineFailed("the engine is closed" if self._is_closed else "the engine is not loaded")
        return self._loaded


def _through(plan: Plan, job: Job, prompts: Prompts, emit: Callable[[Step], None]) -> Callable[[Step], None]:
    """`emit` behind what a plan needs between: a watch over its grammar, and a parser of our own form of calls."""
    watch = prompts.grammars.watch(plan.grammar)
    calls = llamacpp_tools.CallParser(llamacpp_tools.active(job)) if plan.route == "calls" else None
    if watch is None and calls is None:
        return emit

    def emit_seen(step: Step) -> None:
        if watch is not None:
            watch.see(step)
        emit(step if calls is None else calls.parse(step))

    return emit_seen


def _use_template(source: str | None, params: Any) -> None:
    if source is not None:
        params.chat_template = source
