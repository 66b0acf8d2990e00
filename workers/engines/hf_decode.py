"""One sequence on a transformers model: its cache, how the next token is chosen, and when it is over.

Random choices are seeded anew for each token, from the request's seed, the choice and the token's place: a continuation
makes exactly what would have come.
"""

from __future__ import annotations

import secrets
from typing import Any

import torch
import xgrammar
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from headrace.broker.messages import Alternative, Sampling, TokenLogprob
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Generation, Step

PREFILL_TOKENS = 128
"""How many prompt tokens one turn takes, so that the other sequences are not held up for long."""
SEED_STRIDE = 1_000_003
MAX_SEED = 1 << 63


class Decoding:
    """Call `turn` until its step has an `end`; everything here is on the model's thread."""

    def __init__(self, model: Any, vocab: HfVocab, generation: Generation, grammar: Any) -> None:
        self._model = model
        self._vocab = vocab
        self._generation = generation
        self._ids = [*generation.prompt_ids, *generation.generated]
        self._fed = 0
        self._left = generation.max_tokens or 0
        self._cache = DynamicCache(config=model.config)
        self._warpers = _warpers(generation.job.sampling)
        seed = generation.job.sampling.seed
        self._seed = secrets.randbits(32) if seed is None else seed + generation.choice
        self._random = torch.Generator()
        self._matcher: Any = None if grammar is None else xgrammar.GrammarMatcher(grammar)
        self._mask = xgrammar.allocate_token_bitmask(1, len(vocab.tokens))
        if self._matcher is not None:
            for token_id in generation.generated:
                self._matcher.accept_token(token_id)

    def turn(self) -> Step | None:
        """Read more of the prompt (None), or make one token."""
        end = min(self._fed + PREFILL_TOKENS, len(self._ids))
        ids = torch.tensor([self._ids[self._fed : end]], device=self._model.device)
        with torch.inference_mode():
            output = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._fed = end
        if end < len(self._ids):
            return None
        logits = output.logits[0, -1].float().cpu()
        token_id = self._choose(logits.clone())
        return self._step(token_id, logits)

    def _choose(self, scores: torch.Tensor) -> int:
        sampling = self._generation.job.sampling
        self._penalize(scores, sampling)
        for token_id, bias in (sampling.logit_bias or {}).items():
            scores[token_id] += bias
        if self._matcher is not None:
            self._matcher.fill_next_token_bitmask(self._mask)
            xgrammar.apply_token_bitmask_inplace(scores[None], self._mask)
        if sampling.temperature == 0:
            return int(scores.argmax())
        scores = self._warpers(torch.tensor([self._ids]), scores[None])[0]
        made = len(self._ids) - len(self._generation.prompt_ids)
        self._random.manual_seed((self._seed * SEED_STRIDE + made) % MAX_SEED)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))

    def _penalize(self, scores: torch.Tensor, sampling: Sampling) -> None:
        if sampling.repeat_penalty is not None and sampling.repeat_penalty != 1 and sampling.repeat_last_n != 0:
            last = sampling.repeat_last_n
            window = self._ids if last is None or last < 0 else self._ids[-last:]
            penalty = RepetitionPenaltyLogitsProcessor(sampling.repeat_penalty)
            scores[:] = penalty(torch.tensor([window]), scores[None])[0]
        made = torch.tensor(self._ids[len(self._generation.prompt_ids) :], dtype=torch.long)
        counts = torch.bincount(made, minlength=len(scores))
        scores -= counts * (sampling.frequency_penalty or 0.0) + (counts > 0) * (sampling.presence_penalty or 0.0)

    def _step(self, token_id: int, logits: torch.Tensor) -> Step:
        job = self._generation.job
        self._left -= 1
        if self._matcher is not None:
            self._matcher.accept_token(token_id)
        if token_id in self._vocab.eog_ids and not job.ignore_eos:
            return Step((), end="eos")
        self._ids.append(token_id)
        logprobs = None if job.logprobs is None else [self._logprob(token_id, logits, job.logprobs)]
        is_over = self._matcher is not None and self._matcher.is_terminated()
        end: Any = "eos" if is_over else None if self._left else "limit"
        return Step([self._vocab.tokens[token_id]], logprobs, end)

    def _logprob(self, token_id: int, logits: torch.Tensor, wanted: int) -> TokenLogprob:
        """Of the model itself, before anything was done to its logits."""
        told = logits.log_softmax(-1)
        best = told.topk(wanted)
        top = [
            Alternative(i, self._vocab.tokens[i].piece, value)
            for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        return TokenLogprob(token_id, self._vocab.tokens[token_id].piece, float(told[token_id]), top)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """Absent values are OpenAI's defaults: nothing but temperature 1."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (None, 0, 1):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None and sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.typical_p is not None and sampling.typical_p < 1:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    if sampling.top_p is not None and sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
