"""What a request will cost, before anybody has tokenized it: a pod has no tokenizer."""

from __future__ import annotations

import math

from headrace.broker.messages import Batch, Chat, Job, Prompt, Text

TOKENS_PER_BYTE = 0.3
UNSAID_TOKENS = 256
"""How long an answer is taken to be if the request does not limit it."""


def prompt_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt, from the UTF-8 bytes of its text; those of token ids are known."""
    match prompt:
        case Chat(messages):
            return _tokens_of("".join(message.content for message in messages))
        case Text(text):
            return _tokens_of(text)
        case Batch(inputs):
            return sum(map(prompt_tokens, inputs))
    return len(prompt.token_ids)


def cost_tokens(job: Job, context_tokens: int) -> int:
    """All tokens of a job, prompt and every choice; a limit beyond the context asks for no more than the context."""
    if job.kind != "generate":
        return prompt_tokens(job.prompt)
    answer = UNSAID_TOKENS if job.max_tokens is None else job.max_tokens
    return prompt_tokens(job.prompt) + job.n * min(answer, context_tokens)


def _tokens_of(text: str) -> int:
    return math.ceil(len(text.encode(errors="surrogatepass")) * TOKENS_PER_BYTE)
