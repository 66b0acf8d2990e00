"""How large and how deep what an answer is bound to may be: schemas, patterns, grammars, and the tools' schemas.

An engine compiles them, and a few bytes can cost it minutes or all its memory: `(a{1000}){1000}` is a million states.
What is refused here is not stored, not queued and not compiled. Engines have limits of their own besides.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Grammar, Job, JsonSchema, Regex
from headrace.broker.settings import ApiSettings

MAX_TOOLS = 1024
MAX_SCHEMA_VALUES = 20_000
"""Values in a schema, or in the schemas of all tools together: objects, arrays and what stands in them."""
MAX_SCHEMA_CHARS = 500_000
"""Characters of keys and texts in them."""
MAX_COUNT = 65_536
"""The highest `maxLength`, `minItems` and the like; an engine may write a rule for each."""
MAX_PATTERN_CHARS = 4096
MAX_PATTERN_DEPTH = 32
MAX_PATTERN_STATES = 20_000
"""Characters of a pattern with its counted repetitions written out."""
MAX_GRAMMAR_CHARS = 65_536
MAX_GRAMMAR_CHOICES = 512
MAX_GRAMMAR_OPTIONALS = 64
"""Of `|`, and of `?`, `*`, `+` and `{`: for each token llama.cpp follows every way that is still open, all sequences
standing still meanwhile. 64 in a row take it half a second, 128 more than ten."""

_COUNTS = tuple(f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties", "Contains"))
_GBNF_SIGN = re.compile(r'(?s)#[^\n]*+|"(?:\\.|[^"\\])*+(?:"|\Z)|\[(?:\\.|[^\]\\])*+(?:\]|\Z)|[|?*+{]')
_WORD = re.compile(r"(?s)\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\Z)|\{([0-9]*)(,?)([0-9]*)\}[?+]?|[()*+?|]|[^\\]|\\")


def check(job: Job, limits: ApiSettings) -> None:
    """Raises BadRequest, with the worker's word for the field as `param`."""
    match job.constraint:
        case JsonSchema(schema):
            _check_schemas([schema], "response_format", limits)
        case Regex(pattern):
            _check_pattern(pattern, "response_format")
        case Grammar(gbnf):
            _check_grammar(gbnf, "response_format")
    if len(job.tools) > MAX_TOOLS:
        raise BadRequest(f"There must be at most {MAX_TOOLS} tools.", param="tools")
    if job.tools:
        _check_schemas([tool.parameters for tool in job.tools], "tools", limits)


def schema_of(text: str, param: str) -> object:
    """What a schema's JSON text says; raises BadRequest for what is none, or would be too large once it is read."""
    if text.count("{") + text.count("[") + text.count(",") > MAX_SCHEMA_VALUES:
        raise BadRequest(f"{param} must have at most {MAX_SCHEMA_VALUES} values.", param=param)
    try:
        return msgspec.json.decode(text.encode(errors="surrogatepass"))
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{param} is not valid JSON.", param=param) from error


def _check_schemas(schemas: list[dict[str, Any]], param: str, limits: ApiSettings) -> None:
    """Look at every value, with its depth and its key (none for what stands in an array); without recursion."""
    seen, chars = 0, 0
    waiting: list[tuple[int, str, Any]] = [(1, "", schema) for schema in schemas]
    while waiting:
        depth, key, value = waiting.pop()
        seen += 1
        chars += len(key) + (len(value) if isinstance(value, str) else 0)
        if depth > limits.max_depth:
            raise BadRequest(f"A schema must not nest deeper than {limits.max_depth} levels.", param=param)
        inner = len(value) if isinstance(value, dict | list) else 0
        if seen + len(waiting) + inner > MAX_SCHEMA_VALUES or chars > MAX_SCHEMA_CHARS:
            raise BadRequest(
                f"Schemas must have at most {MAX_SCHEMA_VALUES} values and {MAX_SCHEMA_CHARS} characters.", param=param
            )
        _check_keyword(key, value, param)
        if isinstance(value, dict):
            waiting += [(depth + 1, name, each) for name, each in value.items()]
        elif isinstance(value, list):
            waiting += [(depth + 1, "", each) for each in value]


def _check_keyword(key: str, value: Any, param: str) -> None:
    """What a keyword asks for; a property of the same name has a schema in its place, so that it is passed over."""
    if key in _COUNTS and isinstance(value, int | float) and abs(value) > MAX_COUNT:
        raise BadRequest(f"{key} must be at most {MAX_COUNT}.", param=param)
    if key == "pattern" and isinstance(value, str):
        _check_pattern(value, param)
    if key == "patternProperties" and isinstance(value, dict):
        for pattern in value:
            _check_pattern(pattern, param)
    if key in ("$ref", "$dynamicRef") and isinstance(value, str) and not value.startswith("#"):
        raise BadRequest("A schema can refer only to itself, with #.", param=param)


def _check_grammar(gbnf: str, param: str) -> None:
    if len(gbnf) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"A grammar must have at most {MAX_GRAMMAR_CHARS} characters.", param=param)
    signs = [found[0] for found in _GBNF_SIGN.finditer(gbnf) if len(found[0]) == 1]
    choices = signs.count("|")
    if choices > MAX_GRAMMAR_CHOICES or len(signs) - choices > MAX_GRAMMAR_OPTIONALS:
        raise BadRequest(
            f"A grammar must have at most {MAX_GRAMMAR_CHOICES} choices and {MAX_GRAMMAR_OPTIONALS} repetitions.",
            param=param,
        )


def _check_pattern(pattern: str, param: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise BadRequest(f"A pattern must have at most {MAX_PATTERN_CHARS} characters.", param=param)
    if _states(pattern, param) > MAX_PATTERN_STATES:
        raise BadRequest(
            f"A pattern must have at most {MAX_PATTERN_STATES} characters, its repetitions written out.",
            param=param,
        )


def _states(pattern: str, param: str) -> int:
    """The length of a pattern with `{m,n}` written out; it need not be a right one."""
    sums, last = [0], 0  # of each open group, and of what a repetition would repeat
    for found in _WORD.finditer(pattern):
        word = found[0]
        if word == "(":
            sums[-1] += last
            sums.append(0)
            last = 0
            if len(sums) > MAX_PATTERN_DEPTH:
                raise BadRequest(f"A pattern must not nest deeper than {MAX_PATTERN_DEPTH} groups.", param=param)
        elif word == ")" and len(sums) > 1:
            last = sums.pop() + last + 1
        elif found[1] is not None and (found[1] or found[3]):
            last *= max(1, min(int((found[3] or found[1])[:7]), 10**6))
        elif word[0] not in "*+?":
            sums[-1] += last
            last = 1
    return sum(sums) + last
