"""The remote engine reads our own pods, in each format that both know."""

from __future__ import annotations

import pytest

from headrace.broker.messages import Chat, Job, Message, Prompt, Sampling, Text
from headrace.broker.models import RemoteModel
from headrace.workers.engines.protocol import Generation
from headrace.workers.engines.remote import RemoteEngine
from headrace.workers.engines.scripted import oracle
from tests.api.conftest import Deploy
from tests.workers.llamacpp_runs import Stream

HELLO = Chat([Message("user", "héllo 😀")])


def said(text: str, count: int) -> str:
    return "".join(f" {oracle(text, 7, 0, index):08x}" for index in range(count))


@pytest.mark.parametrize("prompt", [HELLO, Text("héllo 😀")], ids=["chat", "plain"])
@pytest.mark.parametrize("api", ["openai", "ollama", "llamacpp", "tgi"])
async def test_a_model_of_another_pod_is_relayed_whole(deploy: Deploy, api: str, prompt: Prompt) -> None:
    deployment = await deploy()
    url = deployment.pods[0].url
    engine = RemoteEngine(RemoteModel(name="m", url=url, api=api, remote_name="scripted"))  # type: ignore[arg-type]
    await engine.load(lambda what, share: None)
    try:
        job = Job("j", "m", prompt, 12, sampling=Sampling(seed=7))
        stream = Stream(engine, Generation(job, await engine.encode(job), [], 12))
        await stream.until(lambda: stream.end or stream.errors)
    finally:
        await engine.close()
    assert stream.errors == []
    [told] = deployment.recorded.told
    assert stream.text == said(_heard(told.job.prompt), 12)
    assert stream.end == "limit"
    assert sum(step.untold for step in stream.steps) == 12
    if not (api == "tgi" and prompt is not HELLO):
        assert stream.steps[-1].prompt_tokens == len(told.prompt_ids)


def _heard(prompt: Prompt) -> str:
    """What the other pod's engine was asked: the words, as they were or in the form of its template."""
    if isinstance(prompt, Chat):
        return prompt.messages[-1].content
    assert isinstance(prompt, Text)
    assert "héllo 😀" in prompt.text
    return prompt.text
