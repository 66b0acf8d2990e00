"""Fields that other servers have been broken through: refused by name, in every format that could mean them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from headrace.api.openapi import BODIES
from tests.api.bodies import VALID
from tests.api.conftest import Deploy
from tests.api.undisturbed import undisturbed

IMAGE = "http://169.254.169.254/latest/meta-data/"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
LONG = "an integer of 5,000 digits"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA, GENERATE, LLAMACPP, TGI = "/api/chat", "/api/generate", "/completion", "/generate"


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "hi"}]}]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # templates of the caller's own are programs
    (CHAT, {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}"}, "chat_template"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
    (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": "{{ x }}"}}, "chat_template_kwargs.enable_thinking"),
    (GENERATE, {"template": "{{ .Prompt }}"}, "template"),
    ("/apply-template", {"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    # what is unpickled, or taken for numbers as it is
    (CHAT, {"prompt_embeds": "gASVJg=="}, "prompt_embeds"),
    (COMPLETIONS, {"prompt_embeds": ["gASVJg=="]}, "prompt_embeds"),
    (COMPLETIONS, {"input_embeds": [[0.1]]}, "input_embeds"),
    (CHAT, {"mm_processor_kwargs": {"x": 1}}, "mm_processor_kwargs"),
    (CHAT, {"logits_processors": ["os.system"]}, "logits_processors"),
    (CHAT, {"vllm_xargs": {"x": "y"}}, "vllm_xargs"),
    (CHAT, {"kv_transfer_params": {"remote_host": "evil.example"}}, "kv_transfer_params"),
    (CHAT, {"lora_path": "/etc"}, "lora_path"),
    # slots, and what belongs to the engine
    (LLAMACPP, {"n_discard": 1}, "n_discard"),
    (LLAMACPP, {"n_discard": -(2**31)}, "n_discard"),
    (LLAMACPP, {"n_keep": -1}, "n_keep"),
    (LLAMACPP, {"id_slot": 2**31}, "id_slot"),
    (LLAMACPP, {"lora": [{"id": 0, "scale": 1}]}, "lora"),
    (LLAMACPP, {"samplers": ["top_k"] * 1000}, "samplers"),
    (CHAT, {"n_discard": 5}, "n_discard"),
    # pictures: nothing is fetched for a caller
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": IMAGE}})}, "messages[0].content[0].type"),
    (CHAT, {"messages": user({"type": "image_url", "image_url": {"url": PIXEL}})}, "messages[0].content[0].type"),
    (CHAT, {"messages": user({"type": "video_url", "video_url": {"url": IMAGE}})}, "messages[0].content[0].type"),
    (CHAT, {"messages": user({"type": "input_audio", "input_audio": {"data": ""}})}, "messages[0].content[0].type"),
    (CHAT, {"messages": user({"type": "file", "file": {"file_id": "x"}})}, "messages[0].content[0].type"),
    (RESPONSES, {"input": user({"type": "input_image", "image_url": IMAGE})}, "input[0].content[0].type"),
    (RESPONSES, {"input": user({"type": "input_file", "file_url": IMAGE})}, "input[0].content[0].type"),
    (
        MESSAGES,
        {"messages": user({"type": "image", "source": {"type": "url", "url": IMAGE}})},
        "messages[0].content[0]",
    ),
    (
        MESSAGES,
        {"messages": user({"type": "document", "source": {"type": "url", "url": IMAGE}})},
        "messages[0].content",
    ),
    (MESSAGES, {"mcp_servers": [{"url": IMAGE}]}, "mcp_servers"),
    (OLLAMA, {"messages": [{"role": "user", "content": "hi", "images": [IMAGE]}]}, "messages[0].images"),
    (GENERATE, {"images": [PIXEL]}, "images"),
    (LLAMACPP, {"image_data": [{"data": PIXEL, "id": 1}]}, "image_data"),
    (LLAMACPP, {"prompt": {"prompt_string": "hi", "multimodal_data": [PIXEL]}}, "prompt"),
    (CHAT, {"image_data": IMAGE}, "image_data"),
    (RESPONSES, {"tools": [{"type": "mcp", "server_url": IMAGE}]}, "tools[0].type"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    # how much
    (CHAT, {"messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
    (MESSAGES, {"messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
    (OLLAMA, {"messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
    (RESPONSES, {"input": [{"role": "user", "content": "x"}] * 10_000}, "input"),
    ("/apply-template", {"messages": [{"role": "user", "content": "x"}] * 10_000}, "messages"),
    (COMPLETIONS, {"logit_bias": {str(index): 1 for index in range(300_000)}}, "logit_bias"),
    (LLAMACPP, {"logit_bias": {str(index): 1 for index in range(300_000)}}, "logit_bias"),
    (RESPONSES, {"logit_bias": {str(index): 1 for index in range(300_000)}}, "logit_bias"),
    (MESSAGES, {"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    (OLLAMA, {"options": {"stop": ["x"] * 1000}}, "options.stop"),
    (TGI, {"parameters": {"stop": ["x"] * 1000}}, "stop"),
    (TGI, {"parameters": {"best_of": 100_000}}, "best_of"),
    (TGI, {"parameters": {"top_n_tokens": 100_000}}, "top_n_tokens"),
    (LLAMACPP, {"n_probs": 100_000}, "n_probs"),
    (LLAMACPP, {"n_cmpl": 100_000}, "n_cmpl"),
    (MESSAGES, {"tools": [{"name": f"t{index}", "input_schema": {}} for index in range(2000)]}, "tools"),
    (OLLAMA, {"tools": [{"function": {"name": f"t{index}"}} for index in range(2000)]}, "tools"),
    ("/v1/embeddings", {"input": ["x"] * 3000}, "input"),
    ("/v1/embeddings", {"dimensions": 10**9}, "dimensions"),
    ("/api/embed", {"input": ["x"] * 3000}, "input"),
    ("/embedding", {"content": ["x"] * 3000}, "content"),
    ("/detokenize", {"tokens": [2**60]}, "tokens"),
    ("/detokenize", {"tokens": [LONG]}, ""),
    (LLAMACPP, {"prompt": [LONG]}, ""),
    (MESSAGES, {"max_tokens": LONG}, "max_tokens"),
    (OLLAMA, {"options": {"num_predict": LONG}}, "options.num_predict"),
    (TGI, {"parameters": {"max_new_tokens": LONG}}, "parameters.max_new_tokens"),
    (OLLAMA, {"format": {"type": "string", "maxLength": LONG}}, "format"),
]


async def test_what_other_servers_were_broken_through_is_refused(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy({"tokens_per_s": 50.0})
    asked = [(path, fields, param, _body(path, fields)) for path, fields, param in REFUSED]
    async with undisturbed(up):
        for path, fields, param, body in asked:
            answer = await up.ask("POST", path, content=body)
            assert answer.status == (422 if path == TGI else 400), (path, fields.keys(), answer.body)
            assert param.partition(".")[0].partition("[")[0] in answer.body.decode(), (path, param, answer.body)
            assert len(answer.body) < 1000 and IMAGE.encode() not in answer.body
        assert len(redis_client.keys("hr:*:job:*")) == 1


def _body(path: str, fields: dict[str, Any]) -> bytes:
    """A valid body with these fields, for the model that is there."""
    body = json.dumps({**VALID[path], **fields}).replace(f'"{LONG}"', "1" + "0" * 4999)
    return body.replace('"model": "m"', '"model": "scripted"').encode()


def test_every_route_that_takes_a_body_is_tried() -> None:
    assert {path for path, _, _ in REFUSED} >= {CHAT, COMPLETIONS, RESPONSES, MESSAGES, OLLAMA, GENERATE, LLAMACPP, TGI}


@pytest.mark.parametrize("path", [path for path, body in BODIES.items() if body.format])
async def test_h7_a_body_that_is_too_large_deep_or_no_text_is_refused_on_every_route(
    deploy: Deploy, redis_client: redis.Redis, path: str
) -> None:
    up = await deploy({"tokens_per_s": 50.0}, api={"max_body_bytes": 300_000})
    valid = json.dumps(VALID[path]).encode()[:-1]
    bodies = {
        valid + b',"x":"' + b"a" * 300_000 + b'"}': 413,
        valid + b',"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}": 400,
        valid + b',"x":"\xff"}': 400,
        valid + b',"x":NaN}': 400,
        b"": 400,
        b"[]": 400,
    }
    async with undisturbed(up):
        for body, status in bodies.items():
            answer = await up.ask("POST", path, content=body)
            assert answer.status in (status, 422 if status == 400 else status), body[-40:]
        assert len(redis_client.keys("hr:*:job:*")) == 1
