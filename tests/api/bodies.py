"""A valid body for each route that takes one."""

from __future__ import annotations

from typing import Any

TURNS = [{"role": "user", "content": "hi"}]
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "m", "messages": TURNS},
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/embeddings": {"model": "m", "input": "hi"},
    "/v1/responses": {"model": "m", "input": "hi"},
    "/v1/messages": {"model": "m", "messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "m", "messages": TURNS},
    "/api/chat": {"model": "m", "messages": TURNS},
    "/api/generate": {"model": "m", "prompt": "hi"},
    "/api/embed": {"model": "m", "input": "hi"},
    "/api/embeddings": {"model": "m", "prompt": "hi"},
    "/completion": {"prompt": "hi"},
    "/completions": {"prompt": "hi"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": TURNS},
    "/embedding": {"content": "hi"},
    "/generate": {"inputs": "hi"},
    "/generate_stream": {"inputs": "hi"},
    "/": {"inputs": "hi"},
    "/chat": {"prompt": "hi"},
}
