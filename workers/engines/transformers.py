"""Hugging Face models on transformers, inside this process: one thread makes a token for each sequence in turn.

It is slow and simple, and runs whatever transformers can load. Read on in `hf_folder.py`, `hf_start.py` (loading) and
`hf_decode.py` (one sequence).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from headrace.broker.errors import BadRequest, EngineFailed, HeadraceError
from headrace.broker.messages import Job, Result, Sampling, Tokens
from headrace.broker.models import TransformersModel
from headrace.workers.engines import hf_folder, hf_prompts
from headrace.workers.engines.protocol import Capabilities, Figures, Generation, Run, Step, Token

if TYPE_CHECKING:
    from headrace.workers.engines.hf_decode import Decoding
    from headrace.workers.engines.hf_start import Loaded

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 2


class _Sequence:
    """A sequence that was started; a protocol `Run`."""

    def __init__(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> None:
        self.generation = generation
        self.is_over = False
        self._emit = emit
        self._fail = fail

    def cancel(self) -> None:
        self.is_over = True

    def give(self, step: Step | Exception) -> None:
        """On the loop's thread: a step, or why there are none. What a listener breaks fails its sequence alone."""
        if self.is_over:
            return
        if isinstance(step, Exception):
            self.is_over = True
            self._fail(step)
            return
        self.is_over = step.end is not None
        try:
            self._emit(step)
        except Exception:
            said = {"event": "sequence_failed", "request_id": self.generation.job.id}
            logger.exception("a reader broke", extra=said)
            self.is_over = True
            self._fail(EngineFailed())


class TransformersEngine:
    """An `Engine` (see `protocol.py`). `_side` answers questions about text while `_thread` makes tokens."""

    def __init__(self, model: TransformersModel, data_dir: str) -> None:
        self.capabilities = Capabilities(slots=model.slots, context_tokens=model.context_tokens)
        self._model = model
        self._data_dir = data_dir
        self._side = ThreadPoolExecutor(1, thread_name_prefix="transformers-side")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers")
        self._loaded: Loaded | None = None
        self._waiting: deque[_Sequence] = deque()
        self._making: asyncio.Task[None] | None = None
        self._is_closed = False
        self._running = 0
        self._steps = 0
        self._step_s = 0.0

    async def load(self, progress: Callable[[str, float], None]) -> None:
        loop = asyncio.get_running_loop()

        def tell(what: str, share: float) -> None:
            if self._is_closed:
                raise EngineFailed("the engine was closed while it loaded")
            loop.call_soon_threadsafe(progress, what, share)

        self._loaded = await loop.run_in_executor(self._side, self._load, tell)
        progress("warming up", 0.0)
        await self._warm_up()
        progress("ready", 1.0)

    def _load(self, tell: Callable[[str, float], None]) -> Loaded:
        folder = hf_folder.find(self._model, self._data_dir, tell)
        tell("starting transformers", 0.0)
        from headrace.workers.engines import hf_start  # takes seconds

        tell("loading", 0.0)
        loaded = hf_start.start(self._model, folder)
        self.capabilities = hf_start.capabilities(self._model, loaded)
        return loaded

    async def _warm_up(self) -> None:
        """Make a few tokens; raises what is wrong if they do not come."""
        ids = self._ready().vocab.tokenize("Once upon a time")
        job = Job("warm-up", "", Tokens(ids), WARM_UP_TOKENS, sampling=Sampling(temperature=0), ignore_eos=True)
        made: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.start(
            Generation(job, ids, [], WARM_UP_TOKENS),
            lambda step: made.set_result(None) if step.end is not None else None,
            made.set_exception,
        )
        await made

    async def encode(self, job: Job) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._side, self._encode, job)

    def _encode(self, job: Job) -> list[int]:
        loaded = self._ready()
        if job.suffix is not None:
            raise BadRequest("this engine cannot fill in text before a suffix", param="suffix")
        if hf_prompts.active_tools(job):
            raise BadRequest("this engine cannot call tools", param="tools")
        if job.think and (loaded.template is None or loaded.template.thinking is None):
            raise BadRequest("this model does not reason, or only in a conversation", param="think")
        if any(not 0 <= i < len(loaded.vocab.tokens) for i in job.sampling.logit_bias or ()):
            raise BadRequest("logit_bias names token ids that the model does not know", param="logit_bias")
        if job.constraint is not None:
            from headrace.workers.engines import hf_start

            hf_start.compiled(loaded.compiler, job.constraint)
        return hf_prompts.encode(loaded.vocab, loaded.template, job, self.capabilities.context_tokens)

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        loaded = self._ready()
        answer = hf_prompts.answer
        return await asyncio.get_running_loop().run_in_executor(self._side, answer, loaded.vocab, loaded.template, job)

    def can_continue(self, job: Job) -> bool:
        return True

    def token(self, token_id: int) -> Token:
        return self._ready().vocab.tokens[token_id]

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        self._ready()
        room = self.capabilities.context_tokens - len(generation.prompt_ids) - len(generation.generated)
        left = max(0, room if generation.max_tokens is None else min(room, generation.max_tokens))
        sequence = _Sequence(msgspec.structs.replace(generation, max_tokens=left), emit, fail)
        if not left:
            asyncio.get_running_loop().call_soon(sequence.give, Step((), end="limit"))
            return sequence
        self._waiting.append(sequence)
        if self._making is None or self._making.done():
            self._making = asyncio.create_task(self._make_all(), name="transformers")
        return sequence

    async def _make_all(self) -> None:
        """Rounds, each one turn of every sequence that has a slot, while there are any."""
        loaded, loop = self._ready(), asyncio.get_running_loop()
        running: dict[_Sequence, Decoding | None] = {}
        while not self._is_closed:
            running = {sequence: decoding for sequence, decoding in running.items() if not sequence.is_over}
            while self._waiting and len(running) < self._model.slots:
                sequence = self._waiting.popleft()
                if not sequence.is_over:
                    running[sequence] = None
            self._running = len(running)
            if not running:
                return
            began_at = time.perf_counter()
            turns = await loop.run_in_executor(self._thread, _turns, loaded, running)
            self._steps += 1
            self._step_s += time.perf_counter() - began_at
            for sequence, step in turns:
                sequence.give(step)

    def figures(self) -> Figures:
        return Figures(self._running, None, self._steps, self._step_s)

    async def check_health(self) -> None:
        self._ready()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._making is not None:
            await asyncio.wait([self._making])
        await asyncio.get_running_loop().run_in_executor(self._side, lambda: None)
        self._loaded = None
        self._side.shutdown(wait=False)
        self._thread.shutdown(wait=False)

    def _ready(self) -> Loaded:
        if self._loaded is None or self._is_closed:
            raise EngineFailed("the engine is closed" if self._is_closed else "the engine is not loaded")
        return self._loaded


def _turns(loaded: Loaded, running: dict[_Sequence, Decoding | None]) -> list[tuple[_Sequence, Step | Exception]]:
    """On the model's thread: one turn of each sequence; what breaks one leaves the others alone."""
    made: list[tuple[_Sequence, Step | Exception]] = []
    for sequence in running:
        if sequence.is_over:
            continue
        try:
            decoding = running[sequence] or loaded.decoding(sequence.generation)
            running[sequence] = decoding
            step = decoding.turn()
        except HeadraceError as error:
            made.append((sequence, error))
        except Exception:
            said = {"event": "sequence_failed", "request_id": sequence.generation.job.id}
            logger.exception("a sequence failed", extra=said)
            made.append((sequence, EngineFailed()))
        else:
            if step is not None:
                made.append((sequence, step))
    return made
