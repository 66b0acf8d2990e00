"""What is said to llama.cpp and what it says back: its OpenAI completions route, with `verbose` for the token ids.

Only what is named here reaches the engine. `llama.cpp/tools/server/README.md` is the reference of both shapes.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed, HeadraceError
from headrace.broker.messages import Alternative, Sampling, TokenLogprob
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.protocol import Generation, Step

RANDOM_SEED = 0xFFFF_FFFF
INT32_MAX = 2**31 - 1
MIN_TEMPERATURE = 1e-3
UNTOLD_LOGPROB = -9999.0
"""OpenAI's word for a log-probability that is not given; ours for tokens that llama.cpp swallows."""


def tokens_left(generation: Generation, context_tokens: int) -> int:
    """How many tokens may still be made: what was asked for, as far as the context has room."""
    room = context_tokens - len(generation.prompt_ids) - len(generation.generated)
    return max(0, room if generation.max_tokens is None else min(room, generation.max_tokens))


def request_body(generation: Generation, context_tokens: int, grammar: str | None = None) -> dict[str, Any]:
    """The request for one sequence."""
    body = sampling_body(generation, context_tokens)
    body |= {
        "prompt": [*generation.prompt_ids, *generation.generated],
        "n_probs": 0 if generation.job.logprobs is None else max(1, generation.job.logprobs),
        "verbose": True,
        # Trims the last chunk, which would hold the whole prompt again.
        "response_fields": ["stop_type"],
    }
    return body if grammar is None else {**body, "grammar": grammar}


def sampling_body(generation: Generation, context_tokens: int) -> dict[str, Any]:
    """What every request says. Absent sampling values are OpenAI's defaults, which are not llama.cpp's."""
    sampling = generation.job.sampling
    seed = sampling.seed
    return {
        "max_tokens": tokens_left(generation, context_tokens),
        "temperature": temperature_of(sampling),
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "top_k": min(max(sampling.top_k or 0, 0), INT32_MAX),
        "min_p": sampling.min_p or 0.0,
        "frequency_penalty": sampling.frequency_penalty or 0.0,
        "presence_penalty": sampling.presence_penalty or 0.0,
        "seed": RANDOM_SEED if seed is None else (seed + generation.choice) % RANDOM_SEED,
        "logit_bias": [[token_id, bias] for token_id, bias in (sampling.logit_bias or {}).items()],
        "repeat_penalty": 1.0 if sampling.repeat_penalty is None else sampling.repeat_penalty,
        "repeat_last_n": _last_n(sampling, context_tokens),
        "typical_p": 1.0 if sampling.typical_p is None else sampling.typical_p,
        "ignore_eos": generation.job.ignore_eos,
        "cache_prompt": True,
        "stream": True,
        # Without it no callback runs during prefill, and nothing could be cancelled there.
        "return_progress": True,
    }


def _last_n(sampling: Sampling, context_tokens: int) -> int:
    """llama.cpp makes a buffer of this length at once, and knows no -1 here: the context is all there can be."""
    asked = 64 if sampling.repeat_last_n is None else sampling.repeat_last_n
    return context_tokens if asked < 0 else min(asked, context_tokens)


def temperature_of(sampling: Sampling) -> float:
    """A temperature near 0 is 0: a logit divided by it is infinite, and no probability can be made of that."""
    asked = 1.0 if sampling.temperature is None else sampling.temperature
    return asked if asked >= MIN_TEMPERATURE else 0.0


class Progress(Struct, frozen=True):
    cache: int = 0


class Refused(Struct, frozen=True):
    code: int = 500
    message: str = ""
    type: str = ""


class _Native(Struct, frozen=True):
    content: str = ""
    tokens: list[int] = []
    tokens_predicted: int = 0
    stop_type: str | None = None


class _Candidate(Struct, frozen=True):
    id: int
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(Struct, frozen=True):
    content: list[_Candidate] = []


class _Choice(Struct, frozen=True):
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Chunk(Struct, frozen=True):
    choices: list[_Choice] = []
    native: _Native | None = field(name="__verbose", default=None)
    prompt_progress: Progress | None = None
    error: Refused | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class StreamReader:
    """Turns the chunks of one sequence into steps, and says when it is over.

    `read` raises a HeadraceError if llama.cpp gave up or speaks otherwise than expected.
    """

    def __init__(self, vocab: GgufVocab, n_predict: int, logprobs: int | None) -> None:
        self._vocab = vocab
        self._n_predict = n_predict
        self._logprobs = logprobs
        self._predicted = 0
        self._cached_tokens = 0

    def read(self, raw: bytes) -> Step | None:
        """The step of a chunk; a chunk about the prefill has none. Nothing may be read after a step with `end`."""
        chunk = _decode(raw)
        if chunk.error is not None:
            raise refusal(chunk.error)
        if chunk.prompt_progress is not None:
            self._cached_tokens = max(self._cached_tokens, chunk.prompt_progress.cache)
            return None
        if chunk.native is None or not chunk.choices:
            raise EngineFailed(f"llama.cpp sent a chunk without token ids: {raw[:200]!r}")
        if chunk.choices[0].finish_reason is not None:
            return Step((), end="eos" if chunk.native.stop_type == "eos" else "limit")
        return self._step(chunk.native, chunk.choices[0].logprobs)

    def _step(self, native: _Native, logprobs: _Logprobs | None) -> Step:
        ids = self._ids(native)
        cached_tokens, self._cached_tokens = self._cached_tokens, 0
        is_eos = ids[-1] in self._vocab.eog_ids
        if is_eos:
            ids.pop()
        return Step(
            tokens=[self._vocab.tokens[i] for i in ids],
            logprobs=None if self._logprobs is None else self._scores(ids, logprobs, is_eos),
            end="eos" if is_eos else "limit" if self._predicted >= self._n_predict else None,
            cached_tokens=cached_tokens,
        )

    def _ids(self, native: _Native) -> list[int]:
        """The chunk's token, and before it those that llama.cpp swallowed while a character was not whole."""
        if len(native.tokens) != 1 or native.tokens_predicted <= self._predicted:
            raise EngineFailed("this build of llama.cpp tells its tokens in another way")
        swallowed = native.tokens_predicted - self._predicted - 1
        self._predicted = native.tokens_predicted
        last = native.tokens[0]
        if not swallowed:
            return [last]
        text = native.content.encode()
        piece = b"" if self._vocab.tokens[last].is_special else self._vocab.tokens[last].piece
        return [*(split(self._vocab.ids, text.removesuffix(piece), swallowed) or []), last]

    def _scores(self, ids: list[int], logprobs: _Logprobs | None, is_eos: bool) -> list[TokenLogprob]:
        scores = [TokenLogprob(i, self._vocab.tokens[i].piece, UNTOLD_LOGPROB) for i in ids]
        if not scores or is_eos or logprobs is None or not logprobs.content:
            return scores
        told = logprobs.content[0]
        top = [Alternative(c.id, self._vocab.tokens[c.id].piece, c.logprob) for c in told.top_logprobs]
        scores[-1] = TokenLogprob(ids[-1], self._vocab.tokens[ids[-1]].piece, told.logprob, top[: self._logprobs])
        return scores


def split(ids: dict[bytes, int], data: bytes, count: int) -> list[int] | None:
    """`data` as `count` tokens: for one token the only answer, for more a possible one, and None if there is none."""
    if count == 1:
        return [ids[data]] if data in ids else None
    for end in range(len(data) - count + 1, 0, -1):
        first = ids.get(data[:end])
        rest = None if first is None else split(ids, data[end:], count - 1)
        if first is not None and rest is not None:
            return [first, *rest]
    return None


def _decode(raw: bytes) -> _Chunk:
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise EngineFailed(f"llama.cpp sent what cannot be read: {error}") from error


def refusal(error: Refused) -> HeadraceError:
    if error.type == "exceed_context_size_error":
        return ContextLengthExceeded(error.message)
    return BadRequest(error.message) if error.code == 400 else EngineFailed(error.message)
