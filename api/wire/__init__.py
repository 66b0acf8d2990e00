"""The wire formats, one module each; `format.py` is what a format must do, `BY_NAME` lists them."""

from __future__ import annotations

from headrace.api.wire.anthropic_messages import AnthropicCountTokens, AnthropicMessages
from headrace.api.wire.embeddings import Embeddings
from headrace.api.wire.format import Format
from headrace.api.wire.llamacpp import LlamacppCompletion
from headrace.api.wire.llamacpp_kinds import LlamacppDetokenize, LlamacppEmbedding, LlamacppTemplate, LlamacppTokenize
from headrace.api.wire.ollama_chat import OllamaChat
from headrace.api.wire.ollama_embed import OllamaEmbed, OllamaEmbeddings
from headrace.api.wire.ollama_generate import OllamaGenerate
from headrace.api.wire.openai_chat import OpenAIChat
from headrace.api.wire.openai_completions import OpenAICompletions
from headrace.api.wire.plain import Plain, PlainLines
from headrace.api.wire.responses import Responses
from headrace.api.wire.tgi import TGI

_FORMATS: tuple[Format, ...] = (
    OpenAIChat(),
    OpenAICompletions(),
    Embeddings(),
    Responses(),
    AnthropicMessages(),
    AnthropicCountTokens(),
    OllamaChat(),
    OllamaGenerate(),
    OllamaEmbed(),
    OllamaEmbeddings(),
    LlamacppCompletion(),
    LlamacppTokenize(),
    LlamacppDetokenize(),
    LlamacppTemplate(),
    LlamacppEmbedding(),
    TGI(),
    Plain(),
    PlainLines(),
)
BY_NAME: dict[str, Format] = {each.name: each for each in _FORMATS}

_FAMILIES: dict[str, str] = {
    "": "openai.chat",
    "/v1/messages": "anthropic.messages",
    "/v1/responses": "openai.responses",
    "/api": "ollama.chat",
    "/": "tgi",
    "/generate": "tgi",
    "/generate_stream": "tgi",
    "/info": "tgi",
    "/chat": "plain",
    "/ws": "plain",
    "/completion": "llamacpp.completion",
    "/completions": "llamacpp.completion",
    "/tokenize": "llamacpp.completion",
    "/detokenize": "llamacpp.completion",
    "/apply-template": "llamacpp.completion",
    "/embedding": "llamacpp.completion",
    "/props": "llamacpp.completion",
    "/slots": "llamacpp.completion",
    "/health": "llamacpp.completion",
}
"""Which format says the errors of an address and of those below it; the longest decides, and "/" is only itself."""
_DEPTH = max(path.count("/") for path in _FAMILIES)


def of_path(path: str) -> Format:
    """The format whose envelope a client expects at an address."""
    family = "/".join(path.split("/", _DEPTH + 1)[: _DEPTH + 1])  # a path may be of nothing but slashes
    while family not in _FAMILIES:
        family = family.rpartition("/")[0]
    return BY_NAME[_FAMILIES[family]]
