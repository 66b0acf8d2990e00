"""A Hugging Face tokenizer as this project needs one: ids to bytes, and text to ids."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xgrammar

from headrace.broker.errors import ConfigError
from headrace.broker.models import WeightsModel
from headrace.workers.engines.chat_template import ChatTemplate
from headrace.workers.engines.protocol import Token


class HfVocab:
    """`vocab_size` is the model's, which may be padded beyond the tokenizer's; `eog_ids` end a generation."""

    def __init__(self, tokenizer: Any, vocab_size: int, eog_ids: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.eog_ids = frozenset(eog_ids)
        added = tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)} | self.eog_ids
        # It knows how each kind of tokenizer (byte level, byte fallback, plain) writes bytes.
        self.info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(self.eog_ids)
        )
        # Ids that only pad the vocabulary stand for nothing.
        self.tokens = [
            Token(i, piece, i in special or i >= len(tokenizer)) for i, piece in enumerate(self.info.decoded_vocab)
        ]
        # Also what is control in all but name, as `<tool_call>`; but not, for example, runs of spaces.
        self.special_texts = [t.content for i, t in sorted(added.items()) if i in special or t.content[:1] in "<["]
        self.bos: str = tokenizer.bos_token or ""
        self.eos: str = tokenizer.eos_token or ""
        self.template_source: str | None = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None

    def tokenize(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids; `<|im_end|>` and its like become the tokens they name. `add_special` adds BOS and the like."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special)
        return ids

    def chat_template(self, model: WeightsModel) -> ChatTemplate | None:
        """The template that the configuration names, or else the model's own; raises ConfigError for a bad one."""
        source = self.template_source
        if model.chat_template is not None:
            try:
                source = Path(model.chat_template).read_text("utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"models: {model.name}: chat_template cannot be read: {error}") from error
        if source is None:
            return None
        return ChatTemplate(source, self.special_texts, bos=self.bos, eos=self.eos, system=model.system)
