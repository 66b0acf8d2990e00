"""Prompts in a Hugging Face vocabulary, and the questions about text that need no model."""

from __future__ import annotations

from headrace.broker.errors import BadRequest, ContextLengthExceeded
from headrace.broker.messages import Batch, Chat, Job, Prompt, Result, Text, Tokens
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.hf_vocab import HfVocab


def encode(vocab: HfVocab, template: ChatTemplate | None, job: Job, context_tokens: int) -> list[int]:
    """The prompt's tokens; raises BadRequest for an empty one, and for one that leaves no room for an answer."""
    param = "messages" if isinstance(job.prompt, Chat) else "prompt"
    ids = _ids(vocab, template, job.prompt)
    if not ids:
        raise BadRequest("the prompt is empty", param=param)
    if len(ids) >= context_tokens:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context_tokens} tokens, but the prompt has {len(ids)} tokens.",
            param=param,
        )
    return ids


def _ids(vocab: HfVocab, template: ChatTemplate | None, prompt: Prompt) -> list[int]:
    """Only a conversation has words of a user among words of ours; a plain text may name any token it likes."""
    match prompt:
        case Tokens(token_ids):
            if any(not 0 <= i < len(vocab.tokens) for i in token_ids):
                raise BadRequest("the prompt has token ids that the model does not know", param="prompt")
            return list(token_ids)
        case Text(text):
            return vocab.tokenize(text, add_special=True) if text else []
        case Chat():
            return [i for piece in _render(template, prompt) for i in vocab.tokenize(piece)]
        case Batch():
            raise BadRequest("one prompt at a time", param="prompt")


def _render(template: ChatTemplate | None, chat: Chat) -> list[str]:
    if template is None:
        raise BadRequest("this model has no chat template; give it a plain prompt", param="messages")
    return template.render(chat.messages)


def answer(vocab: HfVocab, template: ChatTemplate | None, job: Job) -> tuple[Result, int]:
    """The kinds that only need the vocabulary; BadRequest for `embed`."""
    prompt = job.prompt
    match job.kind, prompt:
        case "tokenize", Text(text):
            ids = vocab.tokenize(text, add_special=job.add_special)
            return Result({"tokens": ids, "pieces": [vocab.tokens[i].piece for i in ids]}), 0
        case "tokenize", Chat():
            ids = _ids(vocab, template, prompt)
            return Result({"tokens": ids, "pieces": [vocab.tokens[i].piece for i in ids]}), 0
        case "detokenize", Tokens():
            data = b"".join(vocab.tokens[i].piece for i in _ids(vocab, template, prompt))
            return Result({"text": data.decode("utf-8", "replace")}), 0
        case "render", Chat():
            return Result({"text": "".join(_render(template, prompt))}), 0
        case "count", _:
            return Result({"tokens": len(_ids(vocab, template, prompt))}), 0
    raise BadRequest(f"this model cannot {job.kind} this")
