"""Hugging Face models on vLLM: its engine core is a child process of this one, and does what is heavy.

Read on in `hf_folder.py` (where the model is), `vllm_start.py` (the engine core), `vllm_requests.py` and
`vllm_parse.py` (a job in vLLM's terms), `vllm_sequence.py` (steps) and `vllm_plugin.py` (what runs in the engine core).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from headrace.broker.errors import EngineDied, EngineFailed
from headrace.broker.messages import Job, Result, Sampling, Tokens
from headrace.broker.models import VllmModel
from headrace.workers.engines import hf_folder, hf_prompts
from headrace.workers.engines.protocol import Capabilities, Figures, Generation, Run, Step, Token

if TYPE_CHECKING:
    from headrace.workers.engines.vllm_sequence import Sequence
    from headrace.workers.engines.vllm_start import Loaded

WARM_UP_TOKENS = 4


class VllmEngine:
    """An `Engine` (see `protocol.py`). What blocks is done on one thread of its own, in order.

    That thread also starts the engine core, which lives as long as the thread does.
    """

    def __init__(self, model: VllmModel, data_dir: str) -> None:
        self.capabilities = Capabilities(slots=model.slots, context_tokens=model.context_tokens)
        self._model = model
        self._data_dir = data_dir
        self._side = ThreadPoolExecutor(1, thread_name_prefix="vllm-side")
        self._loaded: Loaded | None = None
        self._open: set[Sequence] = set()
        self._numbers = itertools.count()
        self._is_closed = False

    async def load(self, progress: Callable[[str, float], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(what: str, share: float) -> None:
            if self._is_closed:
                raise EngineFailed("the engine was closed while it loaded")
            loop.call_soon_threadsafe(progress, what, share)

        await loop.run_in_executor(self._side, self._load, tell)
        progress("warming up", 0.0)
        await self._warm_up()
        progress("ready", 1.0)

    def _load(self, tell: Callable[[str, float], None]) -> None:
        folder = hf_folder.find(self._model, self._data_dir, tell)
        tell("starting vLLM", 0.0)
        from headrace.workers.engines import vllm_start  # takes seconds

        tell("loading", 0.0)
        self._loaded = vllm_start.start(self._model, folder)
        self.capabilities = vllm_start.capabilities(self._model, self._loaded)

    async def _warm_up(self) -> None:
        """Make a few tokens; raises EngineFailed if they do not come."""
        ids = self._ready().vocab.tokenize("Once upon a time")
        job = Job("warm-up", "", Tokens(ids), WARM_UP_TOKENS, sampling=Sampling(temperature=0), ignore_eos=True)
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def emit(step: Step) -> None:
            if step.end is not None and not made.done():
                made.set_result(None)

        self.start(Generation(job, ids, [], WARM_UP_TOKENS), emit, made.set_exception)
        try:
            await made
        except Exception as error:
            raise EngineFailed(f"vLLM made no tokens when it was tried: {error}") from error

    async def encode(self, job: Job) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._side, self._encode, job)

    def _encode(self, job: Job) -> list[int]:
        loaded = self._ready()
        loaded.requests.check(job)
        return hf_prompts.encode(loaded.vocab, loaded.template, job, self.capabilities.context_tokens)

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        loaded = self._ready()
        answer = hf_prompts.answer
        return await asyncio.get_running_loop().run_in_executor(self._side, answer, loaded.vocab, loaded.template, job)

    def can_continue(self, job: Job) -> bool:
        """Parsers can be run over the tokens again, but what a stop string holds back of their text is not logged."""
        return not (job.stop and self._ready().requests.is_parsed(job))

    def token(self, token_id: int) -> Token:
        return self._ready().vocab.tokens[token_id]

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        from headrace.workers.engines.vllm_sequence import Sequence

        loaded = self._ready()
        room = self.capabilities.context_tokens - len(generation.prompt_ids) - len(generation.generated)
        left = max(0, room if generation.max_tokens is None else min(room, generation.max_tokens))
        generation = msgspec.structs.replace(generation, max_tokens=left)
        name = f"{generation.job.id}-{generation.choice}-{next(self._numbers)}"
        sequence = Sequence(name, loaded.vocab, emit, fail)
        if left:
            self._open.add(sequence)
            sequence.begin(loaded.llm, loaded.adapters, loaded.requests.make(generation), generation)
            assert sequence.task is not None
            sequence.task.add_done_callback(lambda _: self._open.discard(sequence))
        else:
            asyncio.get_running_loop().call_soon(sequence.give, Step((), end="limit"))
        return sequence

    def figures(self) -> Figures:
        return self._loaded.stats.figures if self._loaded is not None else Figures(0)

    async def check_health(self) -> None:
        """An engine core that died fails no job here: the replica gives them all to others, who go on."""
        if self._ready().llm.errored:
            raise EngineDied("vLLM's engine core has died")

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        tasks = [sequence.task for sequence in self._open if sequence.task is not None]
        for sequence in list(self._open):
            sequence.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)  # their aborts go over what is shut down next
        await asyncio.get_running_loop().run_in_executor(self._side, self._destroy)
        self._side.shutdown(wait=False)

    def _destroy(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.llm.shutdown(timeout=2.0)

    def _ready(self) -> Loaded:
        if self._loaded is None or self._is_closed:
            raise EngineFailed("the engine is closed" if self._is_closed else "the engine is not loaded")
        return self._loaded
