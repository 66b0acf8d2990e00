"""The remote engine on the HTTP server of llama.cpp, with the real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import xllamacpp

from headrace.broker.messages import Chat, Grammar, Job, Message, Text
from headrace.broker.models import RemoteModel
from headrace.workers.engines import model_files
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.remote import RemoteEngine
from tests.workers.llamacpp_runs import CONTEXT, DATA_DIR, GREEDY, Stream, default_model

FRANCE = Chat([Message("system", "You are a helpful assistant."), Message("user", "The capital of France is")])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    params = xllamacpp.CommonParams()
    params.model.path = str(model_files.find(default_model(), DATA_DIR, lambda what, share: None))
    params.n_parallel, params.n_ctx = 2, 2 * CONTEXT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.verbosity = -1
    params.hostnames, params.port = ["127.0.0.1"], 0
    server = xllamacpp.Server(params)
    address = server.listening_address
    yield address if "://" in address else f"http://{address}"
    del server


async def run(url: str, api: Any, job: Job) -> Stream:
    engine = RemoteEngine(RemoteModel(name="m", url=url, api=api))
    await engine.load(lambda what, share: None)
    try:
        stream = Stream(engine, Generation(job, await engine.encode(job), [], job.max_tokens))
        return await stream.until(lambda: stream.end or stream.errors)
    finally:
        await engine.close()


@pytest.mark.parametrize("api", ["openai", "llamacpp"])
async def test_paris_comes_from_the_other_server(url: str, api: str) -> None:
    stream = await run(url, api, Job("j", "m", FRANCE, 24, sampling=GREEDY))
    assert stream.errors == []
    assert "Paris" in stream.text
    assert stream.end == "eos"
    assert stream.steps[-1].prompt_tokens > 10
    assert 3 <= sum(step.untold for step in stream.steps) <= 24


@pytest.mark.parametrize("api", ["openai", "llamacpp"])
async def test_a_limit_is_told_as_one_and_half_characters_are_whole(url: str, api: str) -> None:
    job = Job("j", "m", Text("Hi 😀 there " * 20 + "Hi"), 6, sampling=GREEDY)
    stream = await run(url, api, job)
    assert stream.errors == []
    assert stream.text.startswith(" 😀")
    assert (stream.end, sum(step.untold for step in stream.steps)) == ("limit", 6)


async def test_a_grammar_is_kept_by_the_other_server(url: str) -> None:
    job = Job("j", "m", FRANCE, 8, sampling=GREEDY, constraint=Grammar('root ::= "yes" [0-9]'))
    stream = await run(url, "llamacpp", job)
    assert stream.text[:3] == "yes"
    assert stream.text[3:].isdigit()
