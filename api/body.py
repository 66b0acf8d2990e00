"""What a request body must be before a format looks at its fields: not too deep, JSON, and of the right types.

Reading the bytes from the connection is not done here.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from headrace.broker.errors import BadRequest
from headrace.broker.settings import ApiSettings

T = TypeVar("T")

MAX_BRACKETS = 200_000
"""A body with more brackets than this outside of strings is refused: they are counted one at a time."""

# Everything up to the next bracket, strings skipped whole. Possessive throughout, and an unclosed string runs to the
# end, so that no input makes it scan anything twice.
_TO_BRACKET = re.compile(rb'[^][{}"]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"?[^][{}"]*+)*+(?:([][{}])|\Z)', re.DOTALL)
_BOM = b"\xef\xbb\xbf"
_MISSING = re.compile(r"Object missing required field `(.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_LAST_INDEXES = re.compile(r"(\[[^]]*\])+$")


def check_depth(body: bytes, limits: ApiSettings) -> None:
    """Refuse a body that nests deeper than `limits.max_depth`; raises BadRequest.

    Takes at most about 200 ms for 4 MiB of anything; a body without many brackets costs two counts.
    """
    if body.count(b"[") + body.count(b"{") <= limits.max_depth:
        return
    depth = 0
    for seen, match in enumerate(_TO_BRACKET.finditer(body)):
        if not (bracket := match[1]):
            return
        depth += 1 if bracket in b"[{" else -1
        if depth > limits.max_depth:
            raise BadRequest(f"The body nests deeper than {limits.max_depth} levels.")
        if seen >= MAX_BRACKETS:
            raise BadRequest(f"The body has more than {MAX_BRACKETS // 2} arrays and objects.")


def check_text(body: bytes) -> None:
    """Refuse what is no UTF-8, also where nobody reads it: another reader of the same body might; raises BadRequest."""
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"The body is not valid JSON: it is no UTF-8 at byte {error.start}.") from error


def decode(decoder: msgspec.json.Decoder[T], body: bytes, limits: ApiSettings) -> T:
    """Read a JSON body; raises BadRequest, with `param` naming the field as in `messages[0].role`."""
    check_text(body)
    check_depth(body, limits)
    return decode_again(decoder, body)


def decode_again(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Read a body whose depth was checked before; raises as `decode` does."""
    try:
        return decoder.decode(body.removeprefix(_BOM))
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except msgspec.DecodeError as error:
        why = str(error) if body else "it is empty"
        raise BadRequest(f"The body is not valid JSON: {why}.") from error
    except RecursionError as error:
        raise BadRequest("The body nests too deeply.") from error


def _wrong_field(said: str) -> BadRequest:
    """msgspec says `Expected `int`, got `str` - at `$.messages[0].role``; a path's last index names its list."""
    problem, _, path = said.partition(" - at `")
    path = path.rstrip("`").removeprefix("$").removeprefix(".")
    if missing := _MISSING.fullmatch(problem):
        param = f"{path}.{missing[1]}".lstrip(".")
        return BadRequest(f"{param} is missing.", param=param)
    if unknown := _UNKNOWN.fullmatch(problem):
        param = f"{path}.{unknown[1][:64]}".lstrip(".")
        return BadRequest(f"{param} is not known here.", param=param)
    param = _LAST_INDEXES.sub("", path)
    return BadRequest(f"{param or 'The body'}: {problem[:1].lower()}{problem[1:]}.", param=param or None)
