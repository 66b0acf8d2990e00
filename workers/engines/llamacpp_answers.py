"""What llama.cpp's vocabulary and template answer to jobs that generate nothing; all of it blocks."""

from __future__ import annotations

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Chat, Job, Result, Text, Tokens
from headrace.workers.engines.llamacpp_prompt import Prompts


def answer(job: Job, prompts: Prompts) -> tuple[Result, int]:
    """The result and its prompt tokens; raises BadRequest for a prompt that this kind of job cannot have."""
    vocab = prompts.vocab
    match job.kind, job.prompt:
        case "tokenize", Text(text):
            ids = vocab.tokenize(text, parse_special=True)
            ids = vocab.with_bos(ids) if job.add_special else ids
            return _tokens(ids, prompts)
        case "tokenize", Chat():
            return _tokens(prompts.encode(job), prompts)
        case "detokenize", Tokens(ids):
            prompts.check(ids, "tokens")
            text = b"".join(vocab.tokens[i].piece for i in ids).decode("utf-8", "replace")
            return Result({"text": text}), len(ids)
        case "render", Chat() as chat:
            return Result({"text": "".join(prompts.render(job, chat))}), len(prompts.encode(job))
        case "count", Chat() | Text() | Tokens():
            count = len(prompts.encode(job))
            return Result({"tokens": count}), count
    raise BadRequest(f"a job of kind {job.kind} has no such prompt", param="prompt")


def _tokens(ids: list[int], prompts: Prompts) -> tuple[Result, int]:
    return Result({"tokens": ids, "pieces": [prompts.vocab.tokens[i].piece for i in ids]}), len(ids)
