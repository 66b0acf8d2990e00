"""What a model wrote, as reasoning, text and tool calls: vLLM's parsers, fed one token at a time.

One at a time also when a step has more of them, so that what the parser is after some tokens, and what it has said by
then, is a function of the tokens alone: a successor runs the logged tokens through it and goes on exactly.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.broker.messages import ToolCallDelta
from headrace.workers.engines.hf_vocab import HfVocab
from headrace.workers.engines.protocol import Token


class Parsed(NamedTuple):
    """What some tokens have added."""

    text: str
    reasoning: str
    tool_calls: list[ToolCallDelta]


class Parsing:
    """The parser of one sequence; `has_calls` says whether any tool was called so far."""

    def __init__(self, parser: Any, request: Any, prompt_ids: list[int], vocab: HfVocab) -> None:
        self._parser = parser
        self._request = request
        self._prompt_ids = prompt_ids
        self._vocab = vocab
        # Some parsers look for tokens that are special, and ask to be shown them.
        self._shows_special = not request.skip_special_tokens
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.has_calls = False
        parser.set_prompt_token_ids(prompt_ids)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Be where these tokens have led; what they said is in the log."""
        self.read([self._vocab.tokens[i] for i in token_ids], eos=None, is_last=False)

    def read(self, tokens: Sequence[Token], *, eos: int | None, is_last: bool) -> Parsed:
        """The next tokens; `eos` is the id that ended the sequence, which is not among them."""
        text, reasoning, calls = [], [], list[ToolCallDelta]()
        fed = [(token.id, self._text(token)) for token in tokens]
        if is_last and (eos is not None or not fed):
            fed.append((-1 if eos is None else eos, ""))
        for index, (token_id, piece) in enumerate(fed):
            delta = self._parser.parse_delta(
                delta_text=piece,
                delta_token_ids=[token_id] if token_id >= 0 else [],
                request=self._request,
                prompt_token_ids=self._prompt_ids,
                finished=is_last and index == len(fed) - 1,
            )
            if delta is None:
                continue
            text.append(delta.content or "")
            reasoning.append(delta.reasoning or "")
            calls += map(_call, delta.tool_calls or ())
        self.has_calls = self.has_calls or bool(calls)
        return Parsed("".join(text), "".join(reasoning), calls)

    def constrained(self, token_ids: list[int], reasoning_ended: bool | None) -> list[int]:
        """Those of the tokens that a constraint holds for: what comes after the reasoning."""
        reasoning = self._parser.reasoning_parser
        if reasoning is None:
            return token_ids
        if not reasoning_ended:
            return []
        if reasoning.is_reasoning_end(self._prompt_ids):
            return token_ids
        content: list[int] = reasoning.extract_content_ids(token_ids)
        return content

    def _text(self, token: Token) -> str:
        return "" if token.is_special and not self._shows_special else self._decode(token.piece)


def _call(delta: Any) -> ToolCallDelta:
    function = delta.function
    name, arguments = (function.name, function.arguments) if function is not None else (None, None)
    return ToolCallDelta(delta.index, delta.id or "", name or "", arguments or "")
