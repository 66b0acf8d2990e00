"""A model's vocabulary, its template and its metadata: llama.cpp opened a second time, without the weights.

xllamacpp's Python classes offer neither token ids nor bytes, but its library exports llama.cpp's whole C interface. One
struct is passed by value there and its layout may change with the build, so the handle proves itself when it loads.
"""

from __future__ import annotations

import ctypes
from ctypes import c_bool, c_char_p, c_int32, c_size_t, c_uint8, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import xllamacpp.xllamacpp

from headrace.broker.errors import EngineFailed
from headrace.workers.engines.protocol import Token

SAMPLE = "The 1st line: wörld, 日本語 😀!\n    def f(x):\n\treturn x"
UNKNOWN, CONTROL, USER_DEFINED = 1, 8, 16
MAX_PIECE_BYTES = 1024


class _ModelParams(ctypes.Structure):
    """`llama_model_params` of llama.h (build b11549), with room for what a later build adds at the end."""

    _fields_ = (
        ("devices", c_void_p),
        ("buffer_types", c_void_p),
        ("gpu_layers", c_int32),
        ("modes", c_int32 * 3),
        ("main_gpu", c_int32),
        ("pointers", c_void_p * 4),
        ("flags", c_uint8 * 6),
        ("room", c_uint8 * 434),
    )


VOCAB_ONLY = 0
DEFAULT_FLAGS = (0, 0, 1, 0, 0, 0)

SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_model_default_params": (_ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, _ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_n_ctx_train": (c_int32, [c_void_p]),
    "llama_model_chat_template": (c_char_p, [c_void_p, c_char_p]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_get_attr": (c_int32, [c_void_p, c_int32]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_vocab_get_add_bos": (c_bool, [c_void_p]),
    "llama_vocab_fim_pre": (c_int32, [c_void_p]),
    "llama_vocab_fim_suf": (c_int32, [c_void_p]),
    "llama_vocab_fim_mid": (c_int32, [c_void_p]),
    "llama_model_n_params": (c_uint64, [c_void_p]),
    "llama_model_size": (c_uint64, [c_void_p]),
    "llama_sampler_init_grammar": (c_void_p, [c_void_p, c_char_p, c_char_p]),
    "llama_sampler_free": (None, [c_void_p]),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool]),
}


class GgufVocab:
    """The vocabulary of one GGUF file. Its methods may be called from any thread until `close`.

    `special_texts` are what must never be read as tokens in a user's words. Raises EngineFailed if the installed build
    of llama.cpp is not laid out as this module expects.
    """

    def __init__(self, path: Path) -> None:
        self._library = _library()
        params = self._library.llama_model_default_params()
        if tuple(params.flags) != DEFAULT_FLAGS or params.gpu_layers != -1 or any(params.pointers):
            raise EngineFailed(f"this build of xllamacpp ({_version()}) lays out llama_model_params in a new way")
        params.flags[VOCAB_ONLY] = 1
        self._model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise EngineFailed(f"llama.cpp cannot read the vocabulary of {path}")
        self._vocab = self._library.llama_model_get_vocab(self._model)
        self._read_tokens()
        self.bos_id: int = self._library.llama_vocab_bos(self._vocab)
        self.eos_id: int = self._library.llama_vocab_eos(self._vocab)
        self.adds_bos: bool = self._library.llama_vocab_get_add_bos(self._vocab)
        fim = [getattr(self._library, f"llama_vocab_fim_{name}")(self._vocab) for name in ("pre", "suf", "mid")]
        self.fim: tuple[int, ...] | None = tuple(fim) if min(fim) >= 0 else None
        """The tokens before the text, before its suffix, and before what is filled in; None without such."""
        self.parameters: int = self._library.llama_model_n_params(self._model)
        self.size_bytes: int = self._library.llama_model_size(self._model)
        self.template = self._read_template()
        self.context_tokens = int(self.meta(f"{self.meta('general.architecture')}.context_length") or 0)
        self._prove()

    def _read_tokens(self) -> None:
        ids = range(self._library.llama_vocab_n_tokens(self._vocab))
        attributes = [self._library.llama_vocab_get_attr(self._vocab, i) for i in ids]
        self.eog_ids = frozenset(i for i in ids if self._library.llama_vocab_is_eog(self._vocab, i))
        self.tokens = [
            Token(i, self._piece(i), bool(attributes[i] & (UNKNOWN | CONTROL)) or i in self.eog_ids) for i in ids
        ]
        self.ids = {token.piece: token.id for token in reversed(self.tokens) if not token.is_special}
        self.special_texts = [
            token.piece.decode("utf-8", "replace")
            for token in self.tokens
            if token.is_special or (attributes[token.id] & USER_DEFINED and token.piece.startswith(b"<|"))
        ]

    def _piece(self, token_id: int) -> bytes:
        buffer = ctypes.create_string_buffer(MAX_PIECE_BYTES)
        size = self._library.llama_token_to_piece(self._vocab, token_id, buffer, MAX_PIECE_BYTES, 0, True)
        if size < 0:
            raise EngineFailed(f"token {token_id} is longer than {MAX_PIECE_BYTES} bytes")
        return buffer.raw[:size]

    def _read_template(self) -> str | None:
        template: bytes | None = self._library.llama_model_chat_template(self._model, None)
        return template.decode() if template else None

    def meta(self, key: str) -> str | None:
        """A value of the file's metadata, as text."""
        buffer = ctypes.create_string_buffer(1 << 16)
        size = self._library.llama_model_meta_val_str(self._model, key.encode(), buffer, len(buffer))
        return None if size < 0 else buffer.value.decode()

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of `text`; with `parse_special`, `<|im_end|>` and its like become the tokens they name."""
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        ids = (c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, data, len(data), ids, room, False, parse_special)
        if count < 0:
            raise EngineFailed(f"llama.cpp cannot tokenize a text of {len(data)} bytes")
        return ids[:count]

    def can_parse(self, gbnf: str) -> bool:
        """Whether llama.cpp takes this text as a grammar; it says on stderr why not."""
        sampler = self._library.llama_sampler_init_grammar(self._vocab, gbnf.encode("utf-8", "replace"), b"root")
        if sampler:
            self._library.llama_sampler_free(sampler)
        return bool(sampler)

    def with_bos(self, ids: list[int]) -> list[int]:
        """`ids` as the model wants a prompt to begin."""
        return [self.bos_id, *ids] if self.adds_bos and ids[:1] != [self.bos_id] else ids

    def text(self, token_id: int) -> str:
        """What a token stands for, as a template writes it; a model need not have the token (id -1)."""
        return self.tokens[token_id].piece.decode("utf-8", "replace") if token_id >= 0 else ""

    def close(self) -> None:
        if self._model:
            self._library.llama_model_free(self._model)
            self._model = None

    def _prove(self) -> None:
        """The weights are not there (their context length reads as 0 then), and text survives both ways."""
        pieces = b"".join(self.tokens[i].piece for i in self.tokenize(SAMPLE, parse_special=False))
        is_light = self._library.llama_model_n_ctx_train(self._model) == 0
        if not is_light or pieces.removeprefix(b" ") != SAMPLE.encode():
            self.close()
            raise EngineFailed(f"this build of xllamacpp ({_version()}) does not tokenize as headrace expects")


def _library() -> Any:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    try:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise EngineFailed(f"this build of xllamacpp ({_version()}) does not offer {error}") from error
    return library


def _version() -> str:
    return str(getattr(xllamacpp, "__version__", "of an unknown version"))
