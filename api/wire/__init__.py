"""The wire formats, one module each; `format.py` is what a format must do, `BY_NAME` lists them."""

from __future__ import annotations

from headrace.api.wire.embeddings import Embeddings
from headrace.api.wire.format import Format
from headrace.api.wire.openai_chat import OpenAIChat
from headrace.api.wire.openai_completions import OpenAICompletions
from headrace.api.wire.responses import Responses

BY_NAME: dict[str, Format] = {
    each.name: each
    for each in (
        OpenAIChat(),
        OpenAICompletions(),
        Embeddings(),
        Responses(),
    )
}

_FAMILIES: dict[str, str] = {"/": "openai.chat"}
"""Which format says the errors of the addresses that begin so; the longest beginning decides."""


def of_path(path: str) -> Format:
    """The format whose envelope a client expects at an address."""
    family = max((prefix for prefix in _FAMILIES if path.startswith(prefix)), key=len, default="/")
    return BY_NAME[_FAMILIES[family]]
