"""The remote engine on servers of raw bytes, one for each kind that it knows."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.broker.errors import BadRequest, ContextLengthExceeded, EngineFailed
from headrace.broker.messages import (
    Chat,
    Grammar,
    Job,
    JsonObject,
    JsonSchema,
    Message,
    Prompt,
    Regex,
    Sampling,
    Text,
    Tokens,
    Tool,
    ToolCall,
)
from headrace.broker.models import RemoteModel
from headrace.workers.engines.protocol import Generation, Step
from headrace.workers.engines.remote import RemoteEngine
from tests.support import eventually
from tests.workers.llamacpp_runs import Stream
from tests.workers.remote_server import Server, delta, lines, response, sse

ASK = Chat([Message("user", "hi")])
TOOL = Tool("f", "", {"type": "object", "properties": {"a": {"type": "integer"}}})
WHOLE = sse(delta("A"), delta("B", "stop"), {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 5}})


def job_of(prompt: Prompt = ASK, **fields: Any) -> Job:
    return Job("j", "m", prompt, fields.pop("max_tokens", 8), **fields)


@contextlib.asynccontextmanager
async def loaded(url: str, api: Any = "openai", **fields: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(RemoteModel(name="m", url=url, api=api, **fields))
    await engine.load(lambda what, share: None)
    try:
        yield engine
    finally:
        await engine.close()


def begin(engine: RemoteEngine, job: Job, choice: int = 0) -> Stream:
    return Stream(engine, Generation(job, [], [], job.max_tokens, choice))


async def run(server: Server, job: Job | None = None, api: Any = "openai", **fields: Any) -> Stream:
    """One job on an engine of this server, to its end."""
    async with server.up(), loaded(server.url, api, **fields) as engine:
        job = job or job_of()
        await engine.encode(job)
        stream = begin(engine, job)
        return await stream.until(lambda: stream.end or stream.errors)


def told(stream: Stream) -> tuple[str, str | None, int, int]:
    """Text, end, prompt tokens and completion tokens."""
    assert stream.errors == []
    assert stream.ids == []
    return stream.text, stream.end, stream.steps[-1].prompt_tokens, sum(step.untold for step in stream.steps)


def error(stream: Stream) -> Exception:
    [found] = stream.errors
    assert stream.end is None
    return found


# -- OpenAI -----------------------------------------------------------------------------------------------------------


async def test_a_chat_is_relayed_with_its_usage_and_what_was_asked() -> None:
    server = Server(response(WHOLE + b"data: [DONE]\n\n"))
    sampling = Sampling(temperature=0, top_p=0.5, seed=7, logit_bias={5: 1.0})
    assert told(await run(server, job_of(sampling=sampling), remote_name="theirs")) == ("AB", "eos", 9, 5)
    [(path, body)] = server.requests
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "theirs",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "temperature": 0.0,
        "top_p": 0.5,
        "seed": 7,
        "logit_bias": {"5": 1.0},
        "messages": [{"role": "user", "content": "hi"}],
    }


@pytest.mark.parametrize(
    "tail", [b"", b"data: [DONE]", b"data: [DONE]\r\r", b": bye\n\n", b"data: [DONE]\n\ndata: nonsense\n\n"]
)
async def test_nothing_that_comes_after_the_whole_answer_matters(tail: bytes) -> None:
    assert told(await run(Server(response(WHOLE + tail)))) == ("AB", "eos", 9, 5)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        sse(delta("A")),
        sse(delta("A")) + b'data: {"choices":[{"delta":{"content":"B"},"finish_reason":"stop"}]}\n',
        sse(delta("A"), "[DONE]"),
        sse("[DONE]", delta("A", "stop")),
    ],
)
async def test_a10_an_upstream_that_ends_without_its_terminal_event_is_a_failure(body: bytes) -> None:
    found = error(await run(Server(response(body))))
    assert isinstance(found, EngineFailed)
    assert found.message == "the remote server ended early"


async def test_a10_bytes_that_come_one_by_one_give_the_same_answer() -> None:
    whole = response(sse(delta("é😀"), delta("B"), delta("\u2028", "length")))
    server = Server([whole[i : i + 1] for i in range(len(whole))])
    assert told(await run(server)) == ("é😀B\u2028", "limit", 0, 3)


async def test_reasoning_tools_and_log_probabilities_are_read() -> None:
    entry = {"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": [{"token": "A", "logprob": -0.5}]}
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": '{"a'}}
    body = sse(
        delta(reasoning_content="r1"),
        delta(reasoning="r2"),
        {"choices": [{"delta": {"content": "A"}, "logprobs": {"content": [entry]}}]},
        delta(tool_calls=[call]),
        delta(tool_calls=[{"index": 0, "function": {"arguments": '":1}'}}]),
        delta(finish="tool_calls"),
    )
    stream = await run(Server(response(body)), job_of(tools=[TOOL], logprobs=1))
    assert (stream.reasoning, stream.text, stream.calls, stream.end) == ("r1r2", "A", [("f", '{"a":1}')], "tool_calls")
    [score] = stream.logprobs
    assert (score.piece, score.logprob, [each.piece for each in score.top]) == (b"A", -0.5, [b"A"])


async def test_tools_and_schemas_and_earlier_calls_are_sent() -> None:
    server = Server(response(WHOLE))
    called = Message("assistant", "", [ToolCall("c1", "f", '{"a":1}')])
    chat = Chat([Message("user", "x"), called, Message("tool", "2", tool_call_id="c1")])
    job = job_of(chat, tools=[TOOL], tool_choice="required", tool_name="f", constraint=JsonSchema({"type": "object"}))
    await run(server, job)
    [(_, body)] = server.requests
    assert body["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert body["messages"][2] == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert body["tools"][0]["function"]["parameters"] == TOOL.parameters
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


async def test_plain_prompts_go_to_completions() -> None:
    chunk = {"choices": [{"text": "A", "logprobs": {"tokens": ["A"], "token_logprobs": [-1.0], "top_logprobs": None}}]}
    server = Server(response(sse(chunk, {"choices": [{"text": "", "finish_reason": "length"}]})))
    stream = await run(server, job_of(Text("once"), logprobs=0))
    assert told(stream)[:2] == ("A", "limit")
    assert [(score.piece, score.logprob) for score in stream.logprobs] == [(b"A", -1.0)]
    [(path, body)] = server.requests
    assert (path, body["prompt"]) == ("/v1/completions", "once")


# -- what goes wrong --------------------------------------------------------------------------------------------------


async def test_an_error_in_the_stream_is_a_failure_whose_words_stay_here() -> None:
    found = error(await run(Server(response(sse(delta("A"), {"error": {"message": "boom at /srv/x.py"}})))))
    assert isinstance(found, EngineFailed)
    assert "srv" not in found.message


async def test_what_is_no_json_is_a_failure() -> None:
    assert isinstance(error(await run(Server(response(b"data: {nonsense\n\n")))), EngineFailed)


@pytest.mark.parametrize(("code", "kind"), [("context_length_exceeded", ContextLengthExceeded), ("other", BadRequest)])
async def test_a_refusal_is_told_to_the_caller(code: str, kind: type[Exception]) -> None:
    told = b'{"error": {"message": "too long", "code": "%s", "param": "messages"}}' % code.encode()
    found = error(await run(Server(response(told, "400 Bad Request", "application/json"))))
    assert type(found) is kind
    assert isinstance(found, BadRequest)
    assert ("too long" in found.message, found.param) == (True, "messages")


async def test_a_wrong_key_is_our_fault_and_not_the_callers() -> None:
    found = error(await run(Server(response(b"secret", "401 Unauthorized"))))
    assert isinstance(found, EngineFailed)
    assert "secret" not in found.message


async def test_a_busy_server_is_asked_again() -> None:
    busy = response(b"later", "429 Too Many Requests")
    server = Server(busy, busy, response(WHOLE))
    assert told(await run(server))[0] == "AB"
    assert len(server.requests) == 3


async def test_a_server_that_stays_busy_is_a_failure_in_the_end() -> None:
    found = error(await run(Server(response(b"", "503 Unavailable")), event_timeout_s=0.5))
    assert isinstance(found, EngineFailed)


@pytest.mark.parametrize("begun", [b"", sse(delta("A"))])
async def test_no_event_for_too_long_is_a_failure_also_if_there_are_pings(begun: bytes) -> None:
    pings: list[bytes | float] = [0.1, b": ping\n\n"] * 20
    found = error(await run(Server([response(begun), *pings]), event_timeout_s=0.3))
    assert isinstance(found, EngineFailed)
    assert "no event for 0.3 s" in found.message


async def test_a_server_that_never_answers_is_a_failure_too() -> None:
    found = error(await run(Server([30.0]), event_timeout_s=0.3))
    assert "no event for 0.3 s" in str(found)


async def test_a_server_that_is_away_fails_no_job_but_the_replica() -> None:
    server = Server(response(WHOLE))
    async with server.up(), loaded(server.url, connect_timeout_s=1.0) as engine:
        await engine.check_health()
        engine._model = RemoteModel(name="m", url="http://127.0.0.1:9")
        engine._client.base_url = "http://127.0.0.1:9"  # type: ignore[union-attr]
        stream = begin(engine, job_of())
        await eventually(lambda: engine._is_unreachable, 10)
        assert (stream.steps, stream.errors) == ([], [])
        with pytest.raises(EngineFailed):
            await engine.check_health()


async def test_loading_waits_for_the_server() -> None:
    server = Server(response(WHOLE))
    async with server.up():
        port = int(server.url.rpartition(":")[2])
    engine = RemoteEngine(RemoteModel(name="m", url=server.url))
    said: list[str] = []
    loading = asyncio.create_task(engine.load(lambda what, share: said.append(what)))
    await eventually(lambda: len(said) > 1)
    assert not loading.done()
    async with server.up(port):
        await asyncio.wait_for(loading, 5)
        await engine.close()
    assert said[-1] == "ready"


async def test_a_cancel_closes_the_connection_and_nothing_comes_after_it() -> None:
    server = Server([response(sse(delta("A"))), 30.0])
    async with server.up(), loaded(server.url) as engine:
        stream = begin(engine, job_of())
        await stream.until(lambda: stream.steps)
        stream.run.cancel()
        await asyncio.wait_for(server.closed.wait(), 5)
        assert (stream.text, stream.end, stream.errors) == ("A", None, [])


async def test_closing_ends_what_runs() -> None:
    server = Server([response(sse(delta("A"))), 30.0])
    async with server.up():
        async with loaded(server.url) as engine:
            stream = begin(engine, job_of())
            await stream.until(lambda: stream.steps)
        await asyncio.wait_for(server.closed.wait(), 5)
    assert stream.errors == []


async def test_an_error_of_a_reader_fails_one_sequence() -> None:
    class Broken(Stream):
        def _emit(self, step: Step) -> None:
            raise KeyError("a bug in the loop")

    server = Server(response(WHOLE))
    async with server.up(), loaded(server.url) as engine:
        stream = Broken(engine, Generation(job_of(), [], [], 8))
        await stream.until(lambda: stream.errors)
        assert isinstance(stream.errors[0], EngineFailed)


async def test_what_cannot_be_continued_says_so() -> None:
    engine = RemoteEngine(RemoteModel(name="m", url="http://127.0.0.1:9"))
    assert not engine.can_continue(job_of())
    with pytest.raises(BadRequest):
        await engine.answer(job_of(kind="embed"))
    with pytest.raises(EngineFailed):
        engine.token(1)


# -- the other kinds of server ----------------------------------------------------------------------------------------


async def test_ollama_lines_are_read() -> None:
    body = lines(
        {"message": {"role": "assistant", "content": "", "thinking": "hm"}, "done": False},
        {"message": {"content": "é😀\u2028"}, "done": False},
        {"message": {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}, "done": False},
        {"message": {"content": ""}, "done": True, "done_reason": "stop", "prompt_eval_count": 9, "eval_count": 4},
    )
    server = Server(response(body, kind="application/x-ndjson"))
    sampling = Sampling(temperature=0, repeat_penalty=1.1, repeat_last_n=64, seed=3)
    job = job_of(sampling=sampling, tools=[TOOL], think=True, constraint=JsonObject())
    stream = await run(server, job, "ollama")
    assert told(stream) == ("é😀\u2028", "tool_calls", 9, 4)
    assert (stream.reasoning, stream.calls) == ("hm", [("f", '{"a":1}')])
    [(path, asked)] = server.requests
    assert path == "/api/chat"
    assert asked["options"] == {
        "temperature": 0.0,
        "repeat_penalty": 1.1,
        "repeat_last_n": 64,
        "seed": 3,
        "num_predict": 8,
    }
    assert (asked["think"], asked["format"], len(asked["tools"])) == (True, "json", 1)


async def test_ollama_plain_prompts_are_raw_and_its_errors_are_failures() -> None:
    server = Server(response(lines({"response": "A", "done": False}, {"error": "boom"})))
    assert isinstance(error(await run(server, job_of(Text("once")), "ollama")), EngineFailed)
    [(path, asked)] = server.requests
    assert (path, asked["prompt"], asked["raw"]) == ("/api/generate", "once", True)


async def test_a10_ollama_without_done_has_ended_early() -> None:
    cut = lines({"message": {"content": "A"}, "done": False}) + b'{"done":true}'
    assert "ended early" in str(error(await run(Server(response(cut)), api="ollama")))


async def test_llamacpp_chats_are_rendered_there_first() -> None:
    server = Server(
        response(b'{"prompt": "<u>hi"}', kind="application/json"),
        response(
            sse(
                {"content": "A", "stop": False},
                {"content": "B", "stop": False},
                {"content": "", "stop": True, "stop_type": "limit", "tokens_predicted": 3, "tokens_evaluated": 9},
            )
        ),
    )
    stream = await run(server, job_of(constraint=Grammar("root ::= [a-z]")), "llamacpp")
    assert told(stream) == ("AB", "limit", 9, 3)
    (render, rendered), (path, asked) = server.requests
    assert (render, rendered) == ("/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
    assert (path, asked["prompt"], asked["n_predict"], asked["grammar"]) == (
        "/completion",
        "<u>hi",
        8,
        "root ::= [a-z]",
    )


@pytest.mark.parametrize("body", [b'event: error\ndata: {"message":"boom"}\n\n', sse({"error": {"message": "boom"}})])
async def test_llamacpp_errors_are_failures(body: bytes) -> None:
    found = error(await run(Server(response(sse({"content": "A"}) + body)), job_of(Text("once")), "llamacpp"))
    assert "while it worked" in str(found)


async def test_a10_llamacpp_without_stop_has_ended_early() -> None:
    found = error(await run(Server(response(sse({"content": "A", "stop": False}))), job_of(Tokens([1])), "llamacpp"))
    assert "ended early" in str(found)


async def test_tgi_tokens_are_read_and_its_special_ones_are_not_shown() -> None:
    body = sse(
        {"token": {"id": 1, "text": "A", "logprob": -1, "special": False}, "generated_text": None, "details": None},
        {"token": {"id": 2, "text": " b", "logprob": -1, "special": False}},
        {
            "token": {"id": 0, "text": "</s>", "logprob": 0, "special": True},
            "generated_text": "A b",
            "details": {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 9},
        },
    )
    server = Server(response(body))
    stream = await run(server, job_of(Text("once"), sampling=Sampling(temperature=0), constraint=Regex("a")), "tgi")
    assert told(stream) == ("A b", "eos", 9, 3)
    [(path, asked)] = server.requests
    assert (path, asked["inputs"]) == ("/generate_stream", "once")
    assert asked["parameters"] == {
        "max_new_tokens": 8,
        "do_sample": False,
        "grammar": {"type": "regex", "value": "a"},
    }


async def test_tgi_conversations_go_to_its_openai_route() -> None:
    server = Server(response(WHOLE))
    assert told(await run(server, api="tgi"))[0] == "AB"
    assert server.requests[0][0] == "/v1/chat/completions"


async def test_a10_tgi_without_details_has_ended_early() -> None:
    body = sse({"token": {"id": 1, "text": "A"}}, {"error": "overloaded", "error_type": "overloaded"})
    assert isinstance(error(await run(Server(response(body)), job_of(Text("x")), "tgi")), EngineFailed)
    cut = sse({"token": {"id": 1, "text": "A"}})
    assert "ended early" in str(error(await run(Server(response(cut)), job_of(Text("x")), "tgi")))


@pytest.mark.parametrize(
    ("api", "fields", "param"),
    [
        ("openai", {"sampling": Sampling(top_k=5)}, "top_k"),
        ("openai", {"sampling": Sampling(min_p=0.1)}, "min_p"),
        ("openai", {"sampling": Sampling(repeat_penalty=1.1)}, "repeat_penalty"),
        ("openai", {"constraint": Regex("a")}, "response_format"),
        ("openai", {"think": True}, "think"),
        ("openai", {"ignore_eos": True}, "ignore_eos"),
        ("openai", {"prompt": Chat([Message("assistant", "x")], is_open=True)}, "messages"),
        ("openai", {"prompt": Text("x"), "suffix": "y"}, "suffix"),
        ("openai", {"prompt": Text("x"), "constraint": JsonObject()}, "response_format"),
        ("ollama", {"sampling": Sampling(logit_bias={1: 1.0})}, "logit_bias"),
        ("ollama", {"logprobs": 1}, "logprobs"),
        ("ollama", {"prompt": Tokens([1])}, "prompt"),
        ("ollama", {"constraint": Grammar("root ::= a")}, "response_format"),
        ("ollama", {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("llamacpp", {"tools": [TOOL]}, "tools"),
        ("llamacpp", {"constraint": Regex("a")}, "response_format"),
        ("llamacpp", {"logprobs": 1}, "logprobs"),
        ("tgi", {"prompt": Text("x"), "sampling": Sampling(min_p=0.1)}, "min_p"),
        ("tgi", {"prompt": Text("x"), "sampling": Sampling(logit_bias={1: 1.0})}, "logit_bias"),
        ("tgi", {"prompt": Text("x"), "constraint": Grammar("root ::= a")}, "response_format"),
        ("tgi", {"prompt": Tokens([1])}, "prompt"),
    ],
)
async def test_what_a_server_cannot_be_asked_is_refused_by_name(api: Any, fields: dict[str, Any], param: str) -> None:
    engine = RemoteEngine(RemoteModel(name="m", url="http://127.0.0.1:9", api=api))
    with pytest.raises(BadRequest) as raised:
        await engine.encode(job_of(**fields))
    assert raised.value.param == param


@pytest.mark.parametrize("api", ["openai", "ollama", "llamacpp", "tgi"])
async def test_values_that_change_nothing_are_accepted(api: Any) -> None:
    engine = RemoteEngine(RemoteModel(name="m", url="http://127.0.0.1:9", api=api))
    sampling = Sampling(top_k=0, min_p=0.0, repeat_penalty=1.0, repeat_last_n=64, typical_p=1.0, presence_penalty=0.0)
    assert await engine.encode(job_of(Text("12345"), sampling=sampling)) == [0, 0]
