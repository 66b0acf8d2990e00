"""`/openapi.json`: the document is made of the routes that there are and of the types that bodies are read into.

It says what is accepted, by the same types that refuse the rest. What is sent is said by each format's own
specification; here it has only its media types, and an example of an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

from headrace.api import wire
from headrace.api.access import access_of
from headrace.api.wire.anthropic_request import MessagesRequest
from headrace.api.wire.anthropic_request import Request as CountTokensRequest
from headrace.api.wire.embeddings import EmbeddingsRequest
from headrace.api.wire.llamacpp import CompletionRequest as LlamacppCompletionRequest
from headrace.api.wire.llamacpp_kinds import DetokenizeRequest, EmbeddingRequest, TemplateRequest, TokenizeRequest
from headrace.api.wire.ollama_chat import ChatRequest as OllamaChatRequest
from headrace.api.wire.ollama_embed import EmbeddingsRequest as OllamaEmbeddingsRequest
from headrace.api.wire.ollama_embed import EmbedRequest
from headrace.api.wire.ollama_generate import GenerateRequest as OllamaGenerateRequest
from headrace.api.wire.ollama_models import ShowRequest
from headrace.api.wire.openai_chat import ChatRequest
from headrace.api.wire.openai_completions import CompletionRequest
from headrace.api.wire.plain import PlainRequest
from headrace.api.wire.responses import ResponsesRequest
from headrace.api.wire.tgi import GenerateRequest
from headrace.broker.errors import BadRequest


class Body(NamedTuple):
    """What a route reads, and the format that answers; None if the route answers without a job."""

    type: type[msgspec.Struct]
    format: str | None


BODIES: Mapping[str, Body] = {
    "/v1/chat/completions": Body(ChatRequest, "openai.chat"),
    "/v1/completions": Body(CompletionRequest, "openai.completions"),
    "/v1/embeddings": Body(EmbeddingsRequest, "openai.embeddings"),
    "/v1/responses": Body(ResponsesRequest, "openai.responses"),
    "/v1/messages": Body(MessagesRequest, "anthropic.messages"),
    "/v1/messages/count_tokens": Body(CountTokensRequest, "anthropic.count_tokens"),
    "/api/chat": Body(OllamaChatRequest, "ollama.chat"),
    "/api/generate": Body(OllamaGenerateRequest, "ollama.generate"),
    "/api/embed": Body(EmbedRequest, "ollama.embed"),
    "/api/embeddings": Body(OllamaEmbeddingsRequest, "ollama.embeddings"),
    "/api/show": Body(ShowRequest, None),
    "/completion": Body(LlamacppCompletionRequest, "llamacpp.completion"),
    "/completions": Body(LlamacppCompletionRequest, "llamacpp.completion"),
    "/tokenize": Body(TokenizeRequest, "llamacpp.tokenize"),
    "/detokenize": Body(DetokenizeRequest, "llamacpp.detokenize"),
    "/apply-template": Body(TemplateRequest, "llamacpp.apply-template"),
    "/embedding": Body(EmbeddingRequest, "llamacpp.embedding"),
    "/generate": Body(GenerateRequest, "tgi"),
    "/generate_stream": Body(GenerateRequest, "tgi"),
    "/": Body(GenerateRequest, "tgi"),
    "/chat": Body(PlainRequest, "plain"),
}
"""By path; all of them are POST."""

_TEXT = {"type": "string"}
_MODEL = {"model": _TEXT}
_RESUME = {"after": {"type": "string", "description": "as `Last-Event-ID`"}}
_QUERIES: Mapping[tuple[str, str], Mapping[str, Mapping[str, Any]]] = {
    ("get", "/v1/streams/{job}"): {**_RESUME, "format": {"enum": list(wire.BY_NAME)}},
    ("get", "/v1/responses/{response}"): {
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "minimum": 0},
    },
    ("get", "/v1/responses/{response}/input_items"): {
        "order": {"enum": ["asc", "desc"]},
        "after": _TEXT,
        "limit": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    ("get", "/v1/usage"): {"days": {"type": "integer", "minimum": 1, "maximum": 35}},
    **{("get", path): _MODEL for path in ("/props", "/slots", "/info")},
    **{("post", path): _MODEL for path, body in BODIES.items() if (body.format or "").startswith(("llamacpp", "tgi"))},
}
_READING: Mapping[str, Mapping[str, Any]] = {
    "Last-Event-ID": {"type": "string", "description": "a position: send what follows it"},
    "X-On-Disconnect": {"type": "string", "description": "`cancel`, `continue`, or seconds"},
    "X-Coalesce-Ms": {"type": "integer", "minimum": 0, "maximum": 10_000},
}
_HEADERS: Mapping[str, Mapping[str, Any]] = {
    **_READING,
    "Idempotency-Key": {"type": "string", "minLength": 1, "maxLength": 255},
    "X-Priority": {"enum": ["interactive", "default", "batch"]},
    "X-Queue-Timeout": {"type": "number", "exclusiveMinimum": 0},
    "X-Request-Id": {"type": "string", "maxLength": 128},
    "X-Session-Id": {"type": "string", "maxLength": 128},
}
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_ANYTHING: Mapping[str, Any] = {
    "format": {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}, {"type": "null"}]},
    "value": {"description": "JSON Schema, or a pattern"},
}
"""Ollama's `format`, and the `value` of TGI's `grammar`."""


@lru_cache(maxsize=1)
def document(app: FastAPI) -> bytes:
    """The document of an application, as JSON; made once."""
    schemas, components = msgspec.json.schema_components(
        [body.type for body in BODIES.values()], ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(BODIES, schemas, strict=True))
    fields = {path: components[body["$ref"].rpartition("/")[2]]["properties"] for path, body in bodies.items()}
    for path in ("/chat", "/apply-template"):  # which read it later, so that it has no type there
        fields[path]["messages"] = fields["/v1/chat/completions"]["messages"]
    for component in components.values():
        _for_callers(component)
    paths: dict[str, dict[str, Any]] = {}
    for route in app.state.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:  # pages are for people
            path = route.path_format
            for method in sorted(route.methods or ()):
                paths.setdefault(path, {})[method.lower()] = _operation(method.lower(), path, route, bodies, fields)
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "headrace",
            "version": version("headrace"),
            "description": "There is also the WebSocket `/ws/chat`; its messages are those of `/chat`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }
    return msgspec.json.encode(whole).replace(b"headrace.api.wire.", b"")  # of types whose names stand twice


def _for_callers(component: dict[str, Any]) -> None:
    """Leave out fields of type Any: they stand in a type to be refused whatever they are, but for `_ANYTHING`."""
    component.pop("description", None)  # it is for who maintains the type
    properties = component.get("properties", {})
    for name in [name for name, schema in properties.items() if schema == {"default": None}]:
        properties[name] = _ANYTHING.get(name)
        if properties[name] is None:
            del properties[name]


def _operation(
    method: str, path: str, route: APIRoute, bodies: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    body = BODIES.get(path) if method == "post" else None
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_"),
        "summary": re.sub(r"\W|_", " ", route.name).strip(),
        "tags": [route.endpoint.__module__.rpartition(".")[2]],
        "responses": _responses(path, body),
        "parameters": [*_parameters(method, path, body, fields)],
    }
    if route.endpoint.__doc__:
        operation["description"] = " ".join(route.endpoint.__doc__.split())
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": bodies[path]}}}
    if access_of(path) != "open":
        operation["security"] = [{}, {"bearer": []}, {"key": []}]
    return operation


def _responses(path: str, body: Body | None) -> dict[str, Any]:
    form = wire.of_path(path)
    own = wire.BY_NAME[body.format] if body is not None and body.format else None
    if path in ("/v1/streams/{job}", "/v1/responses/{response}", "/chat"):
        own = form
    kinds: Sequence[str] = ["application/json", *([own.media_type] if own else [])]
    if path == "/metrics" or (path == "/" and body is None):
        kinds = ["text/plain"]
    example = msgspec.json.decode(form.error_body(BadRequest("temperature must be 0 to 2.", param="temperature")))
    return {
        "200": {"description": "the answer", "content": {kind: {} for kind in dict.fromkeys(kinds)}},
        "default": {"description": "an error", "content": {"application/json": {"example": example}}},
    }


def _parameters(method: str, path: str, body: Body | None, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    query = _QUERIES.get((method, path), {})
    headers: Mapping[str, Mapping[str, Any]] = {}
    if body is not None and body.format:
        headers = _HEADERS
        query = {**query, **_RESUME}
    elif (method, path) == ("get", "/chat"):
        headers = _HEADERS
        query = {name: schema for name, schema in fields[path].items() if name not in ("messages", "stream")}
    elif method == "get" and path in ("/v1/streams/{job}", "/v1/responses/{response}"):
        headers = _READING
    return [
        *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in re.findall(r"{(\w+)}", path)),
        *({"name": name, "in": "query", "schema": schema} for name, schema in query.items()),
        *({"name": name, "in": "header", "schema": schema} for name, schema in headers.items()),
    ]
