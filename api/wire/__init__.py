"""The wire formats, one module each; `format.py` is what a format must do, `BY_NAME` lists them."""

from __future__ import annotations

from headrace.api.wire.anthropic_messages import AnthropicCountTokens, AnthropicMessages
from headrace.api.wire.format import Format
from headrace.api.wire.ollama_chat import OllamaChat
from headrace.api.wire.ollama_embed import OllamaEmbed, OllamaEmbeddings
from headrace.api.wire.ollama_generate import OllamaGenerate
from headrace.api.wire.openai_chat import OpenAIChat
from headrace.api.wire.openai_completions import OpenAICompletions

BY_NAME: dict[str, Format] = {
    each.name: each
    for each in (
        OpenAIChat(),
        OpenAICompletions(),
        AnthropicMessages(),
        AnthropicCountTokens(),
        OllamaChat(),
        OllamaGenerate(),
        OllamaEmbed(),
        OllamaEmbeddings(),
    )
}

_FAMILIES: dict[str, str] = {
    "/": "openai.chat",
    "/v1/messages": "anthropic.messages",
    "/api": "ollama.chat",
}
"""Which format says the errors of the addresses that begin so; the longest beginning decides."""


def of_path(path: str) -> Format:
    """The format whose envelope a client expects at an address."""
    family = max((prefix for prefix in _FAMILIES if path.startswith(prefix)), key=len, default="/")
    return BY_NAME[_FAMILIES[family]]
