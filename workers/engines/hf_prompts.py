"""Prompts in a Hugging Face vocabulary, and the questions about text that need no model."""

from __future__ import annotations

from headrace.broker.errors import BadRequest, ContextLengthExceeded
from headrace.broker.messages import Batch, Chat, Job, Result, Text, Tokens, Tool
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.hf_vocab import HfVocab


def encode(vocab: HfVocab, template: ChatTemplate | None, job: Job, context_tokens: int) -> list[int]:
    """The prompt's tokens; raises BadRequest for an empty one, and for one that leaves no room for an answer."""
    param = "messages" if isinstance(job.prompt, Chat) else "prompt"
    ids = _ids(vocab, template, job)
    if not ids:
        raise BadRequest("the prompt is empty", param=param)
    if len(ids) >= context_tokens:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context_tokens} tokens, but the prompt has {len(ids)} tokens.",
            param=param,
        )
    return ids


def _ids(vocab: HfVocab, template: ChatTemplate | None, job: Job) -> list[int]:
    """Only a conversation has words of a user among words of ours; a plain text may name any token it likes."""
    match job.prompt:
        case Tokens(token_ids):
            if any(not 0 <= i < len(vocab.tokens) for i in token_ids):
                raise BadRequest("the prompt has token ids that the model does not know", param="prompt")
            return list(token_ids)
        case Text(text):
            return vocab.tokenize(text, add_special=True) if text else []
        case Chat() as chat:
            return [i for piece in _render(template, chat, job) for i in vocab.tokenize(piece)]
        case Batch():
            raise BadRequest("one prompt at a time", param="prompt")


def active_tools(job: Job) -> list[Tool]:
    """The tools that this job may call; raises BadRequest if it names one that is not there."""
    if job.tool_name is not None:
        named = [tool for tool in job.tools if tool.name == job.tool_name]
        if not named:
            raise BadRequest(f"there is no tool {job.tool_name!r}", param="tool_choice")
        return named
    return [] if job.tool_choice == "none" else job.tools


def _render(template: ChatTemplate | None, chat: Chat, job: Job) -> list[str]:
    if template is None:
        raise BadRequest("this model has no chat template; give it a plain prompt", param="messages")
    return template.render(chat.messages, tools=active_tools(job), think=job.think, is_open=chat.is_open)


def answer(vocab: HfVocab, template: ChatTemplate | None, job: Job) -> tuple[Result, int]:
    """The kinds that only need the vocabulary: the result and its prompt tokens; BadRequest for any other."""
    match job.kind, job.prompt:
        case "tokenize", Text(text):
            return _tokens(vocab, vocab.tokenize(text, add_special=job.add_special))
        case "tokenize", Chat():
            return _tokens(vocab, _ids(vocab, template, job))
        case "detokenize", Tokens():
            ids = _ids(vocab, template, job)
            return Result({"text": b"".join(vocab.tokens[i].piece for i in ids).decode("utf-8", "replace")}), len(ids)
        case "render", Chat() as chat:
            return Result({"text": "".join(_render(template, chat, job))}), len(_ids(vocab, template, job))
        case "count", Chat() | Text() | Tokens():
            count = len(_ids(vocab, template, job))
            return Result({"tokens": count}), count
        case "embed", _:
            raise BadRequest("this engine has no embeddings", param="model")
    raise BadRequest(f"a job of kind {job.kind} has no such prompt", param="prompt")


def _tokens(vocab: HfVocab, ids: list[int]) -> tuple[Result, int]:
    return Result({"tokens": ids, "pieces": [vocab.tokens[i].piece for i in ids]}), len(ids)
