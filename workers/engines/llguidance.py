"""Asks the llguidance inside llama.cpp's library whether a grammar is right: llama.cpp itself would not say.

Of a grammar that llguidance cannot read, llama.cpp writes a line into its log and makes text without any constraint.
`llguidance.h` is the reference; its structs are passed by address here, with room for what a later version adds.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint32, c_void_p
from typing import Any

import xllamacpp.xllamacpp

MARK = "%llguidance {}\n"
"""How a grammar for llguidance begins, in place of GBNF."""

_EOS = b"\xff<eos>"
_ROOM = 1024
_MESSAGE_BYTES = 1024


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


class Llguidance:
    """`error` may be called from any thread. There is one for the process, and it is never freed."""

    def __init__(self, library: Any) -> None:
        self._validate = library.llg_validate_grammar
        self._validate.restype = c_int32
        self._validate.argtypes = [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t]
        data = bytes(range(256)) + _EOS
        lengths = (c_uint32 * 257)(*[1] * 256, len(_EOS))
        init = _Tokenizer(257, 256, lengths, (c_uint8 * len(data))(*data), None, False, None, True)
        library.llg_new_tokenizer.restype = c_void_p
        library.llg_new_tokenizer.argtypes = [POINTER(_Tokenizer), c_char_p, c_size_t]
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        tokenizer = library.llg_new_tokenizer(byref(init), message, _MESSAGE_BYTES)
        library.llg_constraint_init_set_defaults.restype = None
        library.llg_constraint_init_set_defaults.argtypes = [c_void_p, c_void_p]
        self._init = (c_uint8 * _ROOM)()
        self.is_there = bool(tokenizer)
        if tokenizer:
            library.llg_constraint_init_set_defaults(self._init, tokenizer)

    def error(self, grammar: str) -> str | None:
        """What is wrong with a grammar, in one line; None if nothing is."""
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        text = grammar.encode("utf-8", "replace")
        if b"\0" in text:
            return "it has a NUL"
        if self._validate(self._init, b"lark", text, message, _MESSAGE_BYTES) >= 0:
            return None
        first = message.value.decode("utf-8", "replace").split("\n   1 | ")[0]
        return " ".join(first.split()) or "it cannot be read"


def find() -> Llguidance | None:
    """The llguidance that is built into llama.cpp here, if it is and tells right from wrong."""
    try:
        found = Llguidance(ctypes.CDLL(xllamacpp.xllamacpp.__file__))
    except AttributeError:
        return None
    is_right = (
        found.is_there and found.error(MARK + "start: /a/") is None and found.error(MARK + "start: /(/") is not None
    )
    return found if is_right else None
