"""What an answer is bound to, as a grammar that llama.cpp takes, checked before anything is made.

Most builds have llguidance in them, which reads JSON schemas and patterns; without it schemas become GBNF, and there
are no patterns.
"""

from __future__ import annotations

import json
import re
from typing import Any

import xllamacpp

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Constraint, Grammar, JsonObject, JsonSchema, Regex
from headrace.workers.engines import llguidance
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llguidance import MARK

_LAYOUT = {
    "x-guidance": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
        "coerce_one_of": True,
    }
}
"""On one line: white space would have no end otherwise, and a small model may never come out of it. And `oneOf` is
taken for `anyOf`."""


class Grammars:
    """Makes and checks grammars for one model; may be called from any thread."""

    def __init__(self, vocab: GgufVocab) -> None:
        self._vocab = vocab
        uses_llguidance = xllamacpp.json_schema_to_grammar('{"type":"object"}').startswith("%llguidance")
        self._llguidance = llguidance.find() if uses_llguidance else None
        self.kinds: tuple[str, ...] = ("json", "grammar", "regex") if self._llguidance else ("grammar",)
        if not uses_llguidance:
            self.kinds = ("json", "grammar")

    @property
    def has_llguidance(self) -> bool:
        return self._llguidance is not None

    def of(self, constraint: Constraint) -> str:
        """The grammar; raises BadRequest if it is not right, or too much for this build."""
        match constraint:
            case JsonObject():
                return self._of_schema({"type": "object"})
            case JsonSchema(schema):
                return self._of_schema(schema)
            case Grammar(gbnf):
                if not gbnf.strip() or "\0" in gbnf or not self._vocab.can_parse(gbnf):
                    raise BadRequest("the grammar is not GBNF with a rule `root`", param="grammar")
                return gbnf
            case Regex(pattern):
                return self.checked(f"start: /{in_slashes(pattern)}/", "regex")

    def _of_schema(self, schema: dict[str, Any]) -> str:
        if "json" not in self.kinds:
            raise BadRequest("this build of llama.cpp keeps no JSON schemas", param="response_format")
        if self._llguidance is not None:
            return self.checked(f"start: {json_rule(schema)}", "response_format")
        try:
            gbnf: str = xllamacpp.json_schema_to_grammar(json.dumps(schema))
        except (RuntimeError, ValueError) as error:
            raise BadRequest(f"the schema cannot be kept: {error}", param="response_format") from error
        if not self._vocab.can_parse(gbnf):
            raise BadRequest("the schema cannot be kept", param="response_format")
        return gbnf

    def checked(self, rules: str, param: str) -> str:
        """Rules for llguidance as a grammar; raises BadRequest if they are not right, or there is no llguidance."""
        if self._llguidance is None:
            raise BadRequest("this build of llama.cpp cannot keep to that", param=param)
        if (error := self._llguidance.error(MARK + rules)) is not None:
            raise BadRequest(f"this cannot be kept: {error}", param=param)
        return MARK + rules


def json_rule(schema: dict[str, Any]) -> str:
    """A term for JSON of this schema, on one line."""
    return "%json " + json.dumps({**_LAYOUT, **schema})


def in_slashes(pattern: str) -> str:
    """A pattern as it may stand between slashes."""
    return re.sub(r"\\[^\n]|/|\n", lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), pattern)
