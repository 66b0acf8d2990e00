"""Ollama's addresses about models, and requests that are answered without a job."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from headrace.broker.settings import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment
from tests.api.spoken import CHAT, GENERATE, HI, Spoken, ollama_error

DETAILS = {
    "format": "gguf",
    "family": "qwen2",
    "parameters": 494_032_768,
    "quantization": "Q8_0",
    "size_bytes": 500,
    "context_tokens": 32_768,
    "chat_template": "{{x}}",
    "digest": "d" * 64,
}


async def get(up: Deployment, path: str) -> Any:
    answer = await up.ask("GET", path)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    return answer.json


async def says(up: Deployment, **about: str | int) -> None:
    """A replica that says more of its model than the scripted one does."""
    await up.broker.present("replicas", "r", "scripted", {"model": "scripted", "state": "ready", **about})


async def test_h13_what_there_is(deploy: Deploy) -> None:
    up = await deploy({"context_tokens": 100}, workers=0)
    [model] = (await get(up, "/api/tags"))["models"]
    assert model["name"] == model["model"] == "scripted:latest"
    assert len(model["digest"]) == 64 and model["size"] == 0
    assert model["details"]["families"] == []
    assert (await get(up, "/api/ps"))["models"] == []
    await says(up, details=json.dumps(DETAILS))
    [model] = (await get(up, "/api/tags"))["models"]
    assert (model["size"], model["digest"]) == (500, "d" * 64)
    assert model["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "qwen2",
        "families": ["qwen2"],
        "parameter_size": "494.03M",
        "quantization_level": "Q8_0",
    }
    [running] = (await get(up, "/api/ps"))["models"]
    assert (running["digest"], running["details"]) == (model["digest"], model["details"])
    assert (running["size_vram"], running["context_length"]) == (0, 100)


async def test_h13_what_a_model_is(deploy: Deploy) -> None:
    up = await deploy({"context_tokens": 100}, workers=0)
    for name in ({"model": "scripted"}, {"name": "scripted:latest"}, {"model": "scripted", "verbose": True}):
        shown = (await up.ask("POST", "/api/show", json=name)).json
        assert (shown["capabilities"], shown["template"]) == (["completion"], "")
        assert shown["model_info"]["unknown.context_length"] == 100
    await says(up, details=json.dumps(DETAILS), tools="1", reasoning="0", fim="1", embeddings="64", context_tokens=50)
    shown = (await up.ask("POST", "/api/show", json={"model": "scripted"})).json
    assert shown["capabilities"] == ["completion", "tools", "insert", "embedding"]
    assert (shown["template"], shown["parameters"].split()) == ("{{x}}", ["num_ctx", "50"])
    assert shown["model_info"]["qwen2.context_length"] == 32_768
    assert shown["model_info"]["general.parameter_count"] == 494_032_768
    for broken in ("{broken", "[1]", '{"parameters":"many","size_bytes":null}'):
        await says(up, details=broken, tools="yes", fim="", embeddings=0)
        shown = (await up.ask("POST", "/api/show", json={"model": "scripted"})).json
        assert (shown["capabilities"], shown["details"]["parameter_size"]) == (["completion"], "")
    refusals: list[tuple[Any, int]] = [({"model": "nope"}, 404), ({}, 400), ({"model": 5}, 400), ([], 400)]
    for body, status in refusals:
        answer = await up.ask("POST", "/api/show", json=body)
        assert answer.status == status and ollama_error(answer.json)


async def test_probes_that_clients_make(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    for path in ("/", "/api/version", "/api/tags"):
        head = await up.ask("HEAD", path)
        assert (head.status, head.body) == (200, b"")
    assert (await up.ask("GET", "/")).body == b"Ollama is running"
    assert (await get(up, "/api/version"))["version"].count(".") == 2


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("POST", f"/api/{verb}") for verb in ("pull", "push", "create", "copy", "blobs/sha256:00")),
        ("DELETE", "/api/delete"),
    ],
)
async def test_nobody_changes_models_through_here(deploy: Deploy, method: str, path: str) -> None:
    up = await deploy(workers=0)
    answer = await up.ask(method, path, json={"model": "x"})
    assert answer.status == 400 and "configured by" in ollama_error(answer.json)


async def test_i2_every_address_asks_for_the_key(deploy: Deploy) -> None:
    up = await deploy(workers=0, keys=[KeySettings("me", "0" * 64)])
    for method, path in (
        *(("GET", path) for path in ("/", "/api/version", "/api/tags", "/api/ps")),
        *(("POST", f"/api/{path}") for path in ("show", "pull", "push", "create", "copy", "blobs/sha256:00")),
        *(("POST", f"/api/{path}") for path in ("chat", "generate", "embed", "embeddings")),
        ("DELETE", "/api/delete"),
    ):
        assert (await up.ask(method, path, json={"model": "scripted"})).status == 401, path


async def test_h13_a_request_without_a_prompt_makes_no_job(deploy: Deploy) -> None:
    up = await deploy()

    async def ask(path: str, **fields: Any) -> Answer:
        return await up.ask("POST", path, json={"model": "scripted", **fields})

    empties: list[tuple[Spoken, dict[str, Any]]] = [(CHAT, {"messages": []}), (GENERATE, {})]
    for form, empty in empties:
        for keep_alive, reason in (("5m", "load"), (0, "unload")):
            answer = await ask(form.path, **empty, keep_alive=keep_alive)
            assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
            assert (answer.json["done"], answer.json["done_reason"]) == (True, reason)
            assert form.text(answer.json) == ""
        missing = await ask(form.path, model="nope")
        assert missing.status == 404 and "not found" in form.error(missing.json)
    assert (await ask("/api/embed", input=[])).json == {"model": "scripted", "embeddings": []}
    assert up.recorded.told == [] and await up.is_idle()


async def test_h13_a_whole_answer_is_one_object(deploy: Deploy) -> None:
    up = await deploy({"script": ["a"]})
    answer = await up.ask("POST", "/api/chat", json={"model": "scripted", "messages": HI, "stream": False})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["model"] == "scripted"
    asked = await up.ask("POST", "/api/chat", json={"model": "scripted:latest", "messages": HI, "stream": False})
    assert asked.json["model"] == "scripted:latest"
    default = await up.ask("POST", "/api/chat", content=httpx.Request("POST", "http://x", json=CHAT.body).content)
    assert default.headers["content-type"] == "application/x-ndjson"
