"""The deterministic engine: token i of a request is a function of the request and i, at a rate that is configured.

It ships with the product. Load tests and demos need no model with it, and because anybody can compute what it must say
(`oracle`), every token of a stream can be checked. What it says in place of the oracle's words (JSON, tool calls,
written scripts) is in `scripted_parts.py`, its answers to jobs of other kinds in `scripted_answers.py`.
"""

from __future__ import annotations

import asyncio
import heapq
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec import structs

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed
from headrace.broker.messages import Alternative, Batch, Chat, Job, Prompt, Result, Text, TokenLogprob
from headrace.broker.models import ScriptedModel
from headrace.workers.engines import scripted_answers
from headrace.workers.engines.protocol import Capabilities, Details, Figures, Generation, Run, Step, Token
from headrace.workers.engines.scripted_cache import PrefixCache
from headrace.workers.engines.scripted_parts import SPECIAL, Part, end_of, parts_of, piece, script_parts, step_of

DEFAULT_TOKENS = 64
"""How many tokens it makes when no limit is given."""

_RESOLUTION_S = 0.001
_STEP_S = 0.005
"""A step makes the tokens of all sequences that are due within it: engines with continuous batching go in lockstep."""
_LN_HALF = -0.6931471805599453
_BURST = 32  # tokens per sequence and turn at rate 0, so that the loop still turns


def prompt_text(prompt: Prompt) -> str:
    """What the oracle reads: the last user message, or the prompt."""
    if isinstance(prompt, Chat):
        return next((message.content for message in reversed(prompt.messages) if message.role == "user"), "")
    if isinstance(prompt, Batch):
        return " ".join(map(prompt_text, prompt.inputs))
    return prompt.text if isinstance(prompt, Text) else " ".join(map(str, prompt.token_ids))


def _length(prompt: Prompt) -> int:
    """UTF-8 bytes; a token counts for four."""
    match prompt:
        case Chat(messages):
            return sum(len(message.content.encode()) for message in messages)
        case Text(text):
            return len(text.encode())
        case Batch(inputs):
            return sum(map(_length, inputs))
    return 4 * len(prompt.token_ids)


def _bytes_of(prompt: Prompt) -> bytes:
    match prompt:
        case Chat(messages):
            return "".join(message.content for message in messages).encode()
        case Text(text):
            return text.encode()
        case Batch():
            return b""
    return b"".join(token_id.to_bytes(4) for token_id in prompt.token_ids)


def oracle(text: str, seed: int, choice: int, index: int) -> int:
    """The id of a token; its text is a space and the id as 8 lower-case hex digits."""
    return zlib.crc32(f"{text}|{seed}|{choice}|{index}".encode())


def words(job: Job, choice: int) -> Callable[[int], int]:
    """The oracle for one choice of a job, whose text is the prompt's and the suffix, if there is one."""
    text, seed = prompt_text(job.prompt) + (job.suffix or ""), job.sampling.seed or 0
    return lambda index: oracle(text, seed, choice, index)


class _Sequence:
    """One running sequence: when its next token is due, and how far it is. `parts` is what it says, if not oracles."""

    def __init__(
        self,
        generation: Generation,
        emit: Callable[[Step], None],
        fail: Callable[[Exception], None],
        parts: list[Part] | None,
    ) -> None:
        self.generation = generation
        self.parts = parts
        job = generation.job
        text, seed = prompt_text(job.prompt) + (job.suffix or ""), job.sampling.seed or 0
        self.root = zlib.crc32(f"{text}|{seed}|{generation.choice}|".encode())
        """What is the same in all of its `oracle`s."""
        self.index = len(generation.generated)
        self.stop_index = self.index
        """Where it is at its limit, the script's end, or the default's."""
        self.emit = emit
        self.fail = fail
        self.due = 0.0
        self.cached_tokens = 0
        """What its first step is to tell."""
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def _tell_cached(sequence: _Sequence) -> None:
    """Have the next step of a sequence, its first, say how much of the prompt was cached."""
    emit, cached = sequence.emit, sequence.cached_tokens

    def first(step: Step) -> None:
        sequence.emit = emit
        emit(structs.replace(step, cached_tokens=cached))

    sequence.emit, sequence.cached_tokens = first, 0


class ScriptedEngine:
    """See the module and `protocol.Engine`. All sequences share one timer."""

    def __init__(self, model: ScriptedModel) -> None:
        self._model = model
        self._script_parts = script_parts(model)
        self._script = [part.token.piece for part in self._script_parts]
        self._is_plain = all(part.delta is None and part.reasoning is None for part in self._script_parts)
        self._interval_s = 1 / model.tokens_per_s if model.tokens_per_s else 0.0
        self._burst = 1 if self._interval_s else _BURST
        self._grid_s = min(_STEP_S, self._interval_s or _STEP_S)
        self._turns: list[float] = []
        """When there is something to do, a heap; and what, by these times."""
        self._waiting: dict[float, list[_Sequence]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._cache = PrefixCache(model.cache_tokens)
        self._prefilled_until = 0.0
        """When the prompts are done that wait for each other."""
        self._steps = 0
        self._step_s = 0.0
        self._left_until_hung = model.hang_after_tokens
        self.capabilities = Capabilities(
            slots=model.slots,
            context_tokens=model.context_tokens,
            tools=True,
            constraints=("json",),
            reasoning=any(part.reasoning is not None for part in self._script_parts),
            embeddings=model.dimensions,
            fim=True,
            details=Details(format="scripted", family="scripted", context_tokens=model.context_tokens),
            step_tokens=1 if model.prefills_in_turn else 0,
            kv_tokens=model.cache_tokens,
        )

    async def load(self, progress: Callable[[str, float], None]) -> None:
        steps = 20
        for step in range(steps if self._model.startup_s else 0):
            progress("loading", step / steps)
            await asyncio.sleep(self._model.startup_s / steps)
        progress("loading", 1.0)

    async def encode(self, job: Job) -> list[int]:
        """One id for every four bytes, rounded up; the ids say nothing."""
        prompt = job.prompt
        self._parts(job, 0)  # refuses what it cannot say
        if isinstance(prompt, Batch):
            raise BadRequest("one prompt at a time", param="prompt")
        if job.think and not self.capabilities.reasoning:
            raise BadRequest("this model does not reason", param="think")
        tokens = -(-_length(prompt) // 4)
        if tokens >= self._model.context_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {tokens} tokens; this model's context is {self._model.context_tokens}",
                param="messages" if isinstance(prompt, Chat) else "prompt",
            )
        return [0] * tokens

    def can_continue(self, job: Job) -> bool:
        return True

    def token(self, token_id: int) -> Token:
        if self._script:
            data = self._script[token_id]
            return Token(token_id, data, data == SPECIAL.encode())
        return Token(token_id, b" %08x" % token_id if token_id < 1 << 32 else piece(token_id))

    def start(self, generation: Generation, emit: Callable[[Step], None], fail: Callable[[Exception], None]) -> Run:
        sequence = _Sequence(generation, emit, fail, self._parts(generation.job, generation.choice))
        sequence.stop_index = max(sequence.index, self._stop_index(sequence))
        sequence.due = self._prefilled_at(sequence)
        self._schedule(sequence, sequence.due)
        self._arm()
        return sequence

    def _prefilled_at(self, sequence: _Sequence) -> float:
        """When the prefill of a sequence ends that is given to the engine now."""
        tokens, model = len(sequence.generation.prompt_ids), self._model
        if model.cache_tokens:
            sequence.cached_tokens = min(self._cache.use(_bytes_of(sequence.generation.job.prompt)), tokens - 1)
            tokens -= sequence.cached_tokens
        took_s = tokens / model.prefill_tokens_per_s if model.prefill_tokens_per_s else 0.0
        now = asyncio.get_running_loop().time()
        if not model.prefills_in_turn:
            return now + took_s
        self._prefilled_until = max(now, self._prefilled_until) + took_s
        return self._prefilled_until

    async def answer(self, job: Job, advance: Callable[[], None] = lambda: None) -> tuple[Result, int]:
        return scripted_answers.answer(job, self._model, lambda prompt: -(-_length(prompt) // 4))

    def figures(self) -> Figures:
        """A turn that makes tokens is a step."""
        running = sum(not sequence.is_cancelled for waiting in self._waiting.values() for sequence in waiting)
        room = self._model.slots * self._model.context_tokens
        return Figures(running, None, self._steps, self._step_s, room)

    async def check_health(self) -> None:
        """It is always well."""

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._turns.clear()
        self._waiting.clear()

    # -- the steps ------------------------------------------------------------------------------------------------

    def _schedule(self, sequence: _Sequence, at: float) -> None:
        if waiting := self._waiting.get(at):
            waiting.append(sequence)
        else:
            self._waiting[at] = [sequence]
            heapq.heappush(self._turns, at)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._turns:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._turns[0], loop.time()), self._turn)

    def _turn(self) -> None:
        """Make every token whose turn it is by now, or within the timer's resolution."""
        self._timer = None
        began_at = time.perf_counter()
        now = asyncio.get_running_loop().time() + _RESOLUTION_S
        ready: list[_Sequence] = []
        while self._turns and self._turns[0] <= now:
            ready += self._waiting.pop(heapq.heappop(self._turns))
        if self._is_hung(len(ready)):
            return
        for sequence in ready:
            try:
                if sequence.cached_tokens:
                    _tell_cached(sequence)
                if not sequence.is_cancelled and self._step(sequence):
                    sequence.due += self._interval_s
                    self._schedule(sequence, sequence.due // self._grid_s * self._grid_s)
            except Exception as error:  # noqa: BLE001  # of whoever listens: the other sequences go on
                sequence.fail(error)
        self._steps += bool(ready)
        self._step_s += time.perf_counter() - began_at
        self._arm()

    def _is_hung(self, steps: int) -> bool:
        """The fault `hang_after_tokens`, of which a step counts as one."""
        if self._left_until_hung is None:
            return False
        self._left_until_hung -= steps
        return self._left_until_hung < 0

    def _step(self, sequence: _Sequence) -> bool:
        """Emit one step of a sequence; False when that was its last."""
        if sequence.parts is not None:
            return self._say(sequence, sequence.parts)
        first = sequence.index
        sequence.index = last = min(sequence.stop_index, first + self._burst)
        tokens = [self._made(sequence, index) for index in range(first, last)]
        if last == sequence.stop_index:
            self._emit_last(sequence, tokens)
            return False
        sequence.emit(Step(tokens, self._logprobs(sequence, tokens)))
        return True

    def _emit_last(self, sequence: _Sequence, tokens: list[Token]) -> None:
        if self._model.script_end == "error" and self._script and self._is_out(sequence):
            sequence.emit(Step(tokens))
            sequence.fail(EngineFailed("the scripted engine was told to fail"))
        else:
            sequence.emit(Step(tokens, self._logprobs(sequence, tokens), self._end(sequence)))

    def _parts(self, job: Job, choice: int) -> list[Part] | None:
        """What a choice says in place of the oracle's words or a plain script; raises BadRequest if it cannot."""
        if not self._script:
            return parts_of(job, words(job, choice))
        if self._is_plain:
            return None
        return [part for part in self._script_parts if part.reasoning is None or job.think is not False]

    def _say(self, sequence: _Sequence, parts: list[Part]) -> bool:
        """Emit the next part; False when it was the last. A limit that is reached with the last part is a `limit`."""
        generation, at = sequence.generation, sequence.index
        room = self._model.context_tokens - len(generation.prompt_ids)
        if generation.max_tokens is not None:
            room = min(room, len(generation.generated) + generation.max_tokens)
        sequence.index = min(at + 1, len(parts))
        is_out = sequence.index >= len(parts)
        is_last = is_out or sequence.index >= room
        is_eos = is_out and sequence.index < room and not (self._script and self._model.script_end == "limit")
        end = None if not is_last else end_of(parts) if is_eos else "limit"
        is_error = is_out and bool(self._script) and self._model.script_end == "error"
        if at >= min(len(parts), room):
            sequence.emit(Step([], end=end))
        else:
            step = step_of(parts[at], words(generation.job, generation.choice), None if is_error else end)
            sequence.emit(structs.replace(step, logprobs=self._logprobs(sequence, step.tokens)))
        if is_error:
            sequence.fail(EngineFailed("the scripted engine was told to fail"))
        return not is_last

    def _stop_index(self, sequence: _Sequence) -> int:
        """How many tokens a sequence has in all, those that it had before it came here included."""
        generation = sequence.generation
        ends = [self._model.context_tokens - len(generation.prompt_ids)]
        if (natural := self._natural(sequence)) is not None:
            ends.append(natural)
        if generation.max_tokens is not None:
            ends.append(generation.max_tokens + len(generation.generated))
        return min(ends)

    def _natural(self, sequence: _Sequence) -> int | None:
        """How many tokens a sequence has if nothing stops it; None if only a limit ends it."""
        if self._script:
            return len(self._script)
        generation = sequence.generation
        return DEFAULT_TOKENS if generation.max_tokens is None and not generation.job.ignore_eos else None

    def _is_out(self, sequence: _Sequence) -> bool:
        natural = self._natural(sequence)
        return natural is not None and sequence.index >= natural

    def _end(self, sequence: _Sequence) -> Literal["eos", "limit"]:
        """The script says how it ends; a limit that is reached first, or with it, is a `limit`."""
        limit = sequence.generation.max_tokens
        if limit is not None and sequence.index - len(sequence.generation.generated) >= limit:
            return "limit"
        is_limited = bool(self._script) and self._model.script_end == "limit"
        return "eos" if self._is_out(sequence) and not is_limited else "limit"

    def _made(self, sequence: _Sequence, index: int) -> Token:
        """A token of a sequence: of the script, or the oracle's."""
        if self._script:
            return self.token(index)
        token_id = zlib.crc32(b"%d" % index, sequence.root)
        return Token(token_id, b" %08x" % token_id)

    def _logprobs(self, sequence: _Sequence, tokens: Sequence[Token]) -> list[TokenLogprob] | None:
        """Made up, but fixed: the chosen token has probability 1/2, those of the next ids 1/4, 1/8 and so on."""
        wanted = sequence.generation.job.logprobs
        if wanted is None:
            return None
        return [TokenLogprob(token.id, token.piece, _LN_HALF, self._alternatives(token.id, wanted)) for token in tokens]

    def _alternatives(self, token_id: int, count: int) -> list[Alternative]:
        if length := token_id >> 32:  # a token of text: the others of its length
            first, vocabulary = length << 32, 1 << 8 * length
            ids = [first + (token_id - first + k) % vocabulary for k in range(count)]
        else:
            vocabulary = len(self._script) or 1 << 32
            ids = [(token_id + k) % vocabulary for k in range(min(count, vocabulary))]
        return [Alternative(id, self.token(id).piece, _LN_HALF * (k + 1)) for k, id in enumerate(ids)]
