"""What an answer is bound to, as a grammar that llama.cpp takes, checked before anything is made.

Most builds have llguidance in them, which reads JSON schemas and patterns; without it schemas become GBNF, and there
are no patterns.
"""

from __future__ import annotations

import json
import re
from typing import Any

import xllamacpp

from headrace.broker.errors import BadRequest, EngineFailed
from headrace.broker.messages import Constraint, Grammar, JsonObject, JsonSchema, Regex
from headrace.workers.engines import llguidance
from headrace.workers.engines.gbnf import flaw as gbnf_flaw
from headrace.workers.engines.gguf_vocab import GgufVocab
from headrace.workers.engines.llguidance import MARK, Llguidance, Matcher
from headrace.workers.engines.protocol import Step

OPTIONS = "x-guidance"
_LAYOUT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
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
                return self._checked_gbnf(gbnf)
            case Regex(pattern):
                return self.checked(f"start: /{in_slashes(pattern)}/", "regex")

    def _checked_gbnf(self, gbnf: str) -> str:
        if (flaw := gbnf_flaw(gbnf)) is not None:
            raise BadRequest(f"the grammar cannot be kept: {flaw}", param="grammar")
        if not gbnf.strip() or "\0" in gbnf or not self._vocab.can_parse(gbnf):
            raise BadRequest("the grammar is not GBNF with a rule `root`", param="grammar")
        return gbnf

    def _of_schema(self, schema: dict[str, Any]) -> str:
        if "json" not in self.kinds:
            raise BadRequest("this build of llama.cpp keeps no JSON schemas", param="response_format")
        if self._llguidance is not None:
            return self.checked(f"start: {json_rule(schema)}", "response_format")
        try:
            gbnf: str = xllamacpp.json_schema_to_grammar(json.dumps(without_options(schema)))
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

    def watch(self, grammar: str | None) -> Watch | None:
        """What sees to it that an answer keeps to this grammar; None if llama.cpp can be trusted with it."""
        if grammar is None or self._llguidance is None or not grammar.startswith(MARK):
            return None
        return Watch(self._llguidance, grammar)


class Watch:
    """Reads the steps of one answer; `see` raises EngineFailed once it does not keep to its grammar."""

    def __init__(self, llguidance: Llguidance, grammar: str) -> None:
        self._matcher = Matcher(llguidance, grammar)

    def see(self, step: Step) -> None:
        data = b"".join([token.piece for token in step.tokens])
        if (data and not self._matcher.accepts(data)) or (step.end == "eos" and not self._matcher.may_end()):
            raise EngineFailed("llama.cpp could not keep to the form that was asked for")


def json_rule(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    """A term for JSON of this schema, on one line; if `is_lenient`, keywords that are not known are left out.

    `x-guidance` is how llguidance itself is told what to do: what a caller writes there is not passed on.
    """
    return "%json " + json.dumps({**schema, OPTIONS: {**_LAYOUT, "lenient": is_lenient}})


def without_options(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != OPTIONS}


def check_patterns(schema: Any, param: str) -> None:
    """Raise BadRequest for a schema with a pattern that could not be gone on with once it is GBNF."""
    match schema:
        case {"pattern": str(pattern)} if (flaw := gbnf_flaw(pattern)) is not None:
            raise BadRequest(f"the pattern {pattern!r} cannot be kept: {flaw}", param=param)
        case dict():
            for each in schema.values():
                check_patterns(each, param)
        case list():
            for each in schema:
                check_patterns(each, param)


_IN_SLASHES = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}


def in_slashes(pattern: str) -> str:
    """A pattern as it may stand between slashes."""
    return re.sub(r"(?s)\\.|/|\n", lambda found: _IN_SLASHES.get(found[0], found[0]), pattern)
