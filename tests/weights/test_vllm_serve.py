"""The remote engine on vLLM's own server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from headrace.broker.messages import Chat, Job, JsonSchema, Message
from headrace.broker.models import RemoteModel, VllmModel
from headrace.workers.engines import hf_folder
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.remote import RemoteEngine
from tests.weights.conftest import model_of
from tests.workers.llamacpp_runs import CONTEXT, DATA_DIR, GREEDY, Stream

FRANCE = Chat([Message("system", "You are a helpful assistant."), Message("user", "The capital of France is")])
OPTIONS = "--max-num-seqs 2 --enforce-eager --dtype bfloat16 --kv-cache-memory-bytes 134217728 --block-size 32"
ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = model_of("vllm")
    assert isinstance(model, VllmModel)
    folder = hf_folder.find(model, DATA_DIR, lambda what, share: None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` itself, without its command line, which does not find its own version in the CPU build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--served-model-name", "theirs"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT), *OPTIONS.split()]
    environment = {**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("HEADRACE_VLLM_REPLICA", None)
    log = tmp_path_factory.mktemp("vllm") / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + 180
    while server.poll() is None and not _answers(port):
        assert time.monotonic() < deadline, log.read_text()[-5000:]
        time.sleep(0.5)
    assert server.poll() is None, log.read_text()[-5000:]
    yield f"http://127.0.0.1:{port}"
    server.send_signal(signal.SIGTERM)
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200
    return False


@pytest.mark.asyncio
async def test_paris_and_a_schema_come_from_vllms_own_server(url: str) -> None:
    engine = RemoteEngine(RemoteModel(name="m", url=url, remote_name="theirs"))
    await engine.load(lambda what, share: None)

    async def run(**fields: object) -> Stream:
        job = Job("j", "m", FRANCE, 48, sampling=GREEDY, **fields)  # type: ignore[arg-type]
        stream = Stream(engine, Generation(job, await engine.encode(job), [], 48))
        return await stream.until(lambda: stream.end or stream.errors, 60)

    try:
        paris = await run(logprobs=2)
        schema = await run(constraint=JsonSchema({"type": "object", "properties": {}, "additionalProperties": False}))
    finally:
        await engine.close()
    assert (paris.errors, paris.end) == ([], "eos")
    assert "Paris" in paris.text
    assert b"".join(entry.piece for entry in paris.logprobs).decode().startswith(paris.text)
    assert all(len(entry.top) == 2 for entry in paris.logprobs)
    assert paris.steps[-1].prompt_tokens > 10
    assert sum(step.untold for step in paris.steps) == len(paris.logprobs)
    assert schema.text.replace(" ", "").replace("\n", "") == "{}"
