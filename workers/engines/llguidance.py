"""Asks the llguidance inside llama.cpp's library whether a grammar is right: llama.cpp itself would not say.

Of a grammar that llguidance cannot read, llama.cpp writes a line into its log and makes text without any constraint.
`llguidance.h` is the reference; its structs are passed by address here, with room for what a later version adds.
"""

from __future__ import annotations

import ctypes
import re
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

import xllamacpp.xllamacpp

MARK = "%llguidance {}\n"
"""How a grammar for llguidance begins, in place of GBNF."""

_EOS = b"\xff<eos>"
_ROOM = 1024
_STDERR_LEVEL = 12
"""Where the low byte of `LlgConstraintInit.log_stderr_level` is."""
_MESSAGE_BYTES = 1024
_LISTING = re.compile(r"\n +\d+ \| ")


class _Tokenizer(ctypes.Structure):
    """`LlgTokenizerInit`, for a vocabulary of the 256 bytes and an end."""

    _fields_ = (
        ("vocab_size", c_uint32),
        ("eos", c_uint32),
        ("lengths", POINTER(c_uint32)),
        ("bytes", POINTER(c_uint8)),
        ("json", c_char_p),
        ("assumes_string", c_bool),
        ("function", c_void_p),
        ("is_greedy", c_bool),
        ("room", c_uint8 * _ROOM),
    )


SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer": (c_void_p, [POINTER(_Tokenizer), c_char_p, c_size_t]),
    "llg_constraint_init_set_defaults": (None, [c_void_p, c_void_p]),
    "llg_validate_grammar": (c_int32, [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t]),
    "llg_new_matcher": (c_void_p, [c_void_p, c_char_p, c_char_p]),
    "llg_free_matcher": (None, [c_void_p]),
    "llg_matcher_compute_mask": (c_int32, [c_void_p]),
    "llg_matcher_consume_tokens": (c_int32, [c_void_p, POINTER(c_uint32), c_size_t]),
    "llg_matcher_is_accepting": (c_bool, [c_void_p]),
}


class Llguidance:
    """`error` may be called from any thread. There is one for the process, and it is never freed."""

    def __init__(self, library: Any) -> None:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.library = library
        data = bytes(range(256)) + _EOS
        lengths = (c_uint32 * 257)(*[1] * 256, len(_EOS))
        init = _Tokenizer(257, 256, lengths, (c_uint8 * len(data))(*data), None, False, None, True)
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        tokenizer = library.llg_new_tokenizer(byref(init), message, _MESSAGE_BYTES)
        self.init = (c_uint8 * _ROOM)()
        self.is_there = bool(tokenizer)
        if tokenizer:
            library.llg_constraint_init_set_defaults(self.init, tokenizer)
            self.init[_STDERR_LEVEL] = 0

    def error(self, grammar: str) -> str | None:
        """What is wrong with a grammar, in one line; None if nothing is, and an answer can begin."""
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        text = grammar.encode("utf-8", "replace")
        if b"\0" in text:
            return "it has a NUL"
        if self.library.llg_validate_grammar(self.init, b"lark", text, message, _MESSAGE_BYTES) < 0:
            first = _LISTING.split(message.value.decode("utf-8", "replace"))[0]
            return " ".join(first.split()) or "it cannot be read"
        return None if Matcher(self, grammar).can_begin() else "nothing keeps to it"


class Matcher:
    """Sees whether an answer keeps to its grammar, byte by byte.

    llama.cpp takes the constraint off without a word when llguidance finds it too costly in the middle of an answer.
    """

    def __init__(self, llguidance: Llguidance, grammar: str) -> None:
        self._library = llguidance.library
        self._matcher = self._library.llg_new_matcher(llguidance.init, b"lark", grammar.encode("utf-8", "replace"))

    def can_begin(self) -> bool:
        return bool(self._matcher) and int(self._library.llg_matcher_compute_mask(self._matcher)) == 0

    def accepts(self, data: bytes) -> bool:
        """Whether the answer may go on with this; once it may not, it never may again."""
        tokens = (c_uint32 * len(data))(*data)
        return int(self._library.llg_matcher_consume_tokens(self._matcher, tokens, len(data))) == 0

    def may_end(self) -> bool:
        return bool(self._library.llg_matcher_is_accepting(self._matcher))

    def __del__(self) -> None:
        if self._matcher:
            self._library.llg_free_matcher(self._matcher)


def find() -> Llguidance | None:
    """The llguidance that is built into llama.cpp here, if it is and tells right from wrong."""
    try:
        found = Llguidance(ctypes.CDLL(xllamacpp.xllamacpp.__file__))
    except AttributeError:
        return None
    if not found.is_there or found.error(MARK + "start: /(/") is None or found.error(MARK + "start: /a+/") is not None:
        return None
    matcher = Matcher(found, MARK + "start: /a+/")
    is_right = not matcher.may_end() and matcher.accepts(b"aa") and matcher.may_end() and not matcher.accepts(b"b")
    return found if is_right else None
