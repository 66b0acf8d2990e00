"""What a request in Ollama's format means to a worker, and what it may not say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.wire import BY_NAME
from headrace.api.wire.format import Parsed
from headrace.api.wire.ollama import Load
from headrace.broker.errors import BadRequest
from headrace.broker.messages import (
    Batch,
    Chat,
    Job,
    JsonObject,
    JsonSchema,
    Message,
    Sampling,
    Text,
    Tool,
    ToolCall,
)
from headrace.broker.settings import ApiSettings
from tests.api.spoken import HI

LIMITS = ApiSettings(max_messages=8, max_stops=2, max_stop_chars=5)
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI},
    "generate": {"model": "m", "prompt": "hi"},
    "embed": {"model": "m", "input": "hi"},
    "embeddings": {"model": "m", "prompt": "hi"},
}
both = pytest.mark.parametrize("route", ["chat", "generate"])
every = pytest.mark.parametrize("route", LEAST)


def parse(route: str, **fields: Any) -> Parsed:
    """The least that a request must say, and `fields`; a field that is `...` is left out."""
    said = {name: value for name, value in {**LEAST[route], **fields}.items() if value is not ...}
    return BY_NAME[f"ollama.{route}"].parse(json.dumps(said).encode(), LIMITS)


def job(route: str, **fields: Any) -> Job:
    return parse(route, **fields).job


def load(route: str, **fields: Any) -> dict[str, Any]:
    """The answer to a request for which no job is made."""
    with pytest.raises(Load) as loaded:
        parse(route, **fields)
    assert loaded.value.model == "m"
    answer: dict[str, Any] = json.loads(loaded.value.body)
    return answer


@both
def test_h13_a_stream_unless_it_says_no(route: str) -> None:
    assert [parse(route, stream=stream).stream for stream in (..., None, True, False)] == [True, True, True, False]
    assert parse(route).options == {"asked": "m"}
    assert job(route) == Job("", "m", Chat([Message("user", "hi")]))


@both
def test_h1_h13_the_limit(route: str) -> None:
    limits = {3: 3, -1: None, -2: None, 0: None, None: None, 10**9: 10**9}
    for said, meant in limits.items():
        assert job(route, options={"num_predict": said}).max_tokens == meant


@both
def test_h3_options_reach_the_worker_and_zero_as_zero(route: str) -> None:
    fields = (
        *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
        *("repeat_last_n", "typical_p"),
    )
    zeros: dict[str, Any] = {**dict.fromkeys(fields, 0), "repeat_penalty": 1}
    assert job(route, options=zeros).sampling == Sampling(**zeros)
    assert job(route, options=dict.fromkeys(zeros)).sampling == Sampling()
    assert job(route, options={}).sampling == job(route, options=None).sampling == Sampling()
    assert job(route, options={"seed": -1}).sampling.seed is None
    assert job(route, options={"temperature": 2.5, "repeat_last_n": -1}).sampling == Sampling(
        temperature=2.5, repeat_last_n=-1
    )


@both
def test_h2_forms_of_stop(route: str) -> None:
    forms: list[tuple[Any, list[str]]] = [("x", ["x"]), (["x", "y"], ["x", "y"]), ([], []), (None, [])]
    for said, meant in forms:
        assert job(route, options={"stop": said}).stop == meant


@both
def test_hints_change_nothing(route: str) -> None:
    hints: dict[str, Any] = {
        "num_ctx": 4096,
        "num_keep": 5,
        "num_batch": 512,
        "num_gpu": 1,
        "main_gpu": 0,
        "num_thread": 8,
        "numa": False,
        "low_vram": False,
        "f16_kv": True,
        "use_mmap": True,
        "use_mlock": False,
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "tfs_z": 1.0,
        "penalize_newline": True,
        "vocab_only": False,
        "unknown": [1],
    }
    assert job(route, options=hints, keep_alive="5m", unknown={"a": 1}) == job(route)


@both
def test_what_the_answer_must_look_like(route: str) -> None:
    forms: list[tuple[Any, Any]] = [
        ("json", JsonObject()),
        ({"type": "object"}, JsonSchema({"type": "object"})),
        ("", None),
        (None, None),
    ]
    for said, meant in forms:
        assert job(route, format=said).constraint == meant


@both
def test_thinking_and_log_probabilities(route: str) -> None:
    thinks = {True: True, False: False, None: None, "low": True, "high": True}
    assert {said: job(route, think=said).think for said in thinks} == thinks
    asked: list[tuple[dict[str, Any], int | None]] = [
        ({}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
        ({"logprobs": False}, None),
    ]
    for fields, meant in asked:
        assert job(route, **fields).logprobs == meant


@every
def test_h13_forms_of_keep_alive(route: str) -> None:
    for keep_alive in ("5m", "-1", -1, 0, 300, 1.5, "1h30m", "300", "1.5h", "0", None):
        assert job(route, keep_alive=keep_alive) == job(route)
    for keep_alive in ("abc", "", "5 m", "1" * 5000 + "x", "m5"):
        refused("keep_alive", route, keep_alive=keep_alive)


@both
def test_h13_without_a_prompt_it_is_about_the_model(route: str) -> None:
    field = "messages" if route == "chat" else "prompt"
    empty: list[Any] = [..., None, [] if route == "chat" else ""]
    for value in empty:
        answer = load(route, **{field: value})
        assert (answer["done"], answer["done_reason"], answer["model"]) == (True, "load", "m")
        assert (answer["message"]["content"] if route == "chat" else answer["response"]) == ""
        for zero in (0, "0", "0s", 0.0):
            assert load(route, **{field: value}, keep_alive=zero)["done_reason"] == "unload"
    refused("keep_alive", route, **{field: ...}, keep_alive="abc")
    refused("model", route, **{field: ...}, model="")


# -- chat -------------------------------------------------------------------------------------------------------------


def chat(*messages: dict[str, Any]) -> Chat:
    prompt = job("chat", messages=list(messages)).prompt
    assert isinstance(prompt, Chat)
    return prompt


def test_turns_are_taken_as_they_are() -> None:
    made = chat(
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi", "images": []},
        {"role": "assistant", "content": "b", "thinking": "hm"},
        {"role": "user"},
    )
    assert made == Chat(
        [Message("system", "be"), Message("user", "hi"), Message("assistant", "b", reasoning="hm"), Message("user", "")]
    )
    assert chat(*HI, {"role": "assistant", "content": "It is"}).is_open


def test_results_find_their_calls() -> None:
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"a": 1}}, **more}

    def result(content: str, **more: Any) -> dict[str, Any]:
        return {"role": "tool", "content": content, **more}

    made = chat(
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g"), call("f", id="mine")]},
        result("1", tool_name="g"),
        result("2", tool_call_id="mine"),
        result("3"),
        result("4", tool_name="lost"),
        result("5", tool_name="f"),
    )
    arguments = '{"a":1}'
    calls = [
        ToolCall("call_1_0", "f", arguments),
        ToolCall("call_1_1", "g", arguments),
        ToolCall("mine", "f", arguments),
    ]
    assert made.messages[1:] == [
        Message("assistant", "", calls),
        Message("tool", "1", tool_call_id="call_1_1", name="g"),
        Message("tool", "2", tool_call_id="mine", name="f"),
        Message("tool", "3", tool_call_id="call_1_0", name="f"),
        Message("tool", "4", name="lost"),
        Message("tool", "5", name="f"),
    ]
    assert not chat(*HI, {"role": "assistant", "tool_calls": [call("f")]}).is_open


def test_tools() -> None:
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert job("chat", tools=[{"type": "function", "function": function}]).tools == [
        Tool("f", "does", {"type": "object"})
    ]
    assert job("chat", tools=[{"function": {"name": "f"}}]).tools == [Tool("f")]
    assert job("chat", tools=[]).tools == []


# -- generate ---------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_turn_or_bare_text() -> None:
    assert job("generate", system="be").prompt == Chat([Message("system", "be"), Message("user", "hi")])
    assert job("generate", raw=True).prompt == Text("hi")
    filled = job("generate", suffix="end")
    assert (filled.prompt, filled.suffix) == (Text("hi"), "end")
    assert job("generate", suffix="end", prompt="").prompt == Text("")
    nothing: dict[str, Any] = {"template": "", "context": [], "images": [], "system": "", "suffix": ""}
    assert job("generate", **nothing) == job("generate")


# -- embeddings -------------------------------------------------------------------------------------------------------


def test_inputs_of_embeddings() -> None:
    one = Job("", "m", Batch([Text("hi")]), kind="embed")
    assert job("embed") == job("embeddings") == one
    assert job("embed", input=["a", "b"], truncate=True, options={"num_ctx": 5}).prompt == Batch([Text("a"), Text("b")])
    assert not parse("embed").stream
    assert parse("embed", dimensions=3).options["dimensions"] == 3
    assert load("embed", input="") == load("embed", input=[]) == {"model": "m", "embeddings": []}
    assert load("embeddings", prompt=None) == {"embedding": []}


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(param: str, route: str, **fields: Any) -> None:
    with pytest.raises(BadRequest) as error:
        parse(route, **fields)
    assert error.value.param == param, fields
    body = json.loads(BY_NAME[f"ollama.{route}"].error_body(error.value))
    assert body.keys() == {"error"} and param in body["error"]


@every
def test_h4_every_route_needs_a_model(route: str) -> None:
    for model in ("", ..., 5):
        refused("model", route, model=model)


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_predict", -3),
        ("num_predict", "3"),
        ("num_predict", 3.5),
        ("temperature", -0.1),
        ("temperature", 1e308),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("typical_p", -1),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("seed", 2**63),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [None]),
        ("stop", 5),
        ("stop", ["a", "b", "c"]),
        ("stop", "abcdef"),
        ("mirostat", 2),
        ("tfs_z", 0.5),
        ("penalize_newline", False),
        ("vocab_only", True),
        ("logits_all", True),
        ("embedding_only", True),
        ("num_ctx", "big"),
    ],
)
def test_options_that_cannot_be_honoured(route: str, name: str, value: Any) -> None:
    refused(f"options.{name}", route, options={name: value})


@both
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("format", {"format": "xml"}),
        ("format", {"format": [1]}),
        ("think", {"think": "much"}),
        ("think", {"think": 1}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("stream", {"stream": "yes"}),
        ("n", {"n": 2}),
        ("options", {"options": []}),
    ],
)
def test_fields_of_both_that_are_wrong(route: str, param: str, fields: dict[str, Any]) -> None:
    refused(param, route, **fields)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("messages", {"messages": HI * 9}),
        ("messages", {"messages": "hi"}),
        ("messages[0].role", {"messages": [{"role": "banana", "content": "x"}]}),
        ("messages[0].images", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}),
        ("messages[0].tool_calls", {"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]}),
        ("tools[0].type", {"tools": [{"type": "web", "function": {"name": "f"}}]}),
        ("tools[0].function.name", {"tools": [{"function": {"name": ""}}]}),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
    ],
)
def test_chats_that_are_wrong(param: str, fields: dict[str, Any]) -> None:
    refused(param, "chat", **fields)


@pytest.mark.parametrize("name", ["template", "context", "images", "width", "height", "steps"])
def test_what_generate_cannot_do(name: str) -> None:
    refused(name, "generate", **{name: [1]})


@pytest.mark.parametrize("more", [{"raw": True}, {"suffix": "end"}])
def test_a_system_prompt_needs_a_template(more: dict[str, Any]) -> None:
    refused("system", "generate", system="be", **more)


def test_embeddings_that_are_wrong() -> None:
    refused("input", "embed", input=...)
    refused("input", "embed", input=[5])
    refused("input", "embed", input=["x"] * 2049)
    refused("dimensions", "embed", dimensions=-1)
    refused("options.mirostat", "embed", options={"mirostat": 1})
