"""A Hugging Face tokenizer as this project needs one: ids to bytes, and text to ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xgrammar

from headrace.workers.engines.protocol import Token


class HfVocab:
    """`vocab_size` is the model's, which may be padded beyond the tokenizer's; `eog_ids` end a generation."""

    def __init__(self, tokenizer: Any, vocab_size: int, eog_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.eog_ids = frozenset(eog_ids)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)} | self.eog_ids
        # It knows how each kind of tokenizer (byte level, byte fallback, plain) writes bytes.
        pieces = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size).decoded_vocab
        # Ids that only pad the vocabulary stand for nothing.
        self.tokens = [Token(i, piece, i in special or i >= len(tokenizer)) for i, piece in enumerate(pieces)]
        # Also what is control in all but name, as `<tool_call>`; but not, for example, runs of spaces.
        self.special_texts = [t.content for i, t in sorted(added.items()) if i in special or t.content[:1] in "<["]
        self.bos: str = tokenizer.bos_token or ""
        self.eos: str = tokenizer.eos_token or ""
        self.template: str | None = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; `<|im_end|>` and its like become the tokens they name. `add_special` adds BOS and the like."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special)
        return ids
