"""Many models: other names for one, others in place of one, and models that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec import structs

from headrace.broker import models_file
from headrace.broker.models import Adapter, Model, ScriptedModel
from headrace.workers.engines.scripted import oracle
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment, count
from tests.api.reading import content
from tests.support import an_admission, eventually

SPARE = ScriptedModel(name="spare", slots=64, tokens_per_s=0.0)


def offer(up: Deployment, models: Sequence[Model]) -> None:
    """As if the configuration of the pods had these; the replica serves `spare`."""
    for pod in range(len(up.pods)):
        up.state(pod).settings = structs.replace(up.settings, models=list(models))


def said(tokens: int) -> str:
    return "".join(f" {oracle('hi', 0, 0, index):08x}" for index in range(tokens))


async def test_an_alias_is_the_model(deploy: Deploy) -> None:
    up = await deploy({"name": "spare"})
    offer(up, [structs.replace(SPARE, aliases=["gpt-4o", "org/Other:7b"])])
    for name in ("gpt-4o", "org/Other:7b", "spare", "spare:latest"):
        answer = await up.post(model=name, max_tokens=3)
        assert (answer.status, answer.json["model"], answer.headers["x-headrace-model"]) == (200, "spare", "spare")
    listed = (await up.ask("GET", "/v1/models")).json["data"]
    assert [(row["id"], row.get("root")) for row in listed] == [
        ("spare", None), ("gpt-4o", "spare"), ("org/Other:7b", "spare"),
    ]  # fmt: skip
    assert (await up.ask("GET", "/v1/models/org/Other:7b")).json["id"] == "spare"
    unknown = await up.post(model="gpt-5")
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_model_that_nobody_serves_is_answered_by_the_next_that_somebody_serves(
    deploy: Deploy, stream: bool
) -> None:
    up = await deploy({"name": "spare"})
    main = ScriptedModel(name="main", fallbacks=["away", "spare"])
    offer(up, [main, ScriptedModel(name="away"), SPARE])
    before = count("headrace_fallbacks_total", model="main", fallback="spare")
    answer = await up.post(model="main", max_tokens=3, stream=stream)
    assert (answer.status, answer.headers["x-headrace-model"]) == (200, "spare")
    if stream:
        assert content(answer.events) == said(3)
        assert {event.json["model"] for event in answer.events if event.data != "[DONE]"} == {"spare"}
    else:
        assert (answer.json["model"], answer.json["choices"][0]["message"]["content"]) == ("spare", said(3))
    assert count("headrace_fallbacks_total", model="main", fallback="spare") == before + 1


async def test_without_a_fallback_that_takes_it_the_model_itself_refuses(deploy: Deploy) -> None:
    up = await deploy({"name": "spare"})
    offer(up, [ScriptedModel(name="main", fallbacks=["away"]), ScriptedModel(name="away"), SPARE])
    await up.broker.note_unplaced("main", "main has no place")
    refused = await up.post(model="main")
    assert (refused.status, refused.error["code"], refused.error["message"]) == (
        503, "no_capacity", "main has no place",
    )  # fmt: skip


@pytest.mark.parametrize(("fallback_on", "status"), [(("no_capacity",), 429), (("no_capacity", "queue_full"), 200)])
async def test_a_full_queue_is_a_reason_only_where_it_is_said(
    deploy: Deploy, fallback_on: tuple[str, ...], status: int
) -> None:
    up = await deploy({"name": "spare"}, {"max_waiting_jobs": 1})
    await up.broker.present("cluster", "test", "main", {})
    await up.broker.admit(an_admission(model="main"))
    offer(up, [ScriptedModel(name="main", fallbacks=["spare"], fallback_on=fallback_on), SPARE])  # type: ignore[arg-type]
    answer = await up.post(model="main", max_tokens=3)
    assert answer.status == status


async def test_an_adapter_is_a_model_that_the_replicas_of_its_base_serve(deploy: Deploy) -> None:
    up = await deploy({"name": "spare", "adapters": [Adapter("polite"), Adapter("rude")]})
    before = count("headrace_tokens_total", model="polite", kind="completion")
    names = ("polite", "spare", "rude", "polite")
    answers = await asyncio.gather(*(up.post(model=name, max_tokens=3) for name in names))
    assert [(each.status, each.json["model"]) for each in answers] == [
        (200, "polite"), (200, "spare"), (200, "rude"), (200, "polite"),
    ]  # fmt: skip
    assert sorted(told.job.model for told in up.recorded.told) == ["polite", "polite", "rude", "spare"]
    assert count("headrace_tokens_total", model="polite", kind="completion") == before + 6
    listed = (await up.ask("GET", "/v1/models")).json["data"]
    assert [(row["id"], row.get("parent")) for row in listed] == [
        ("spare", None), ("polite", "spare"), ("rude", "spare"),
    ]  # fmt: skip
    assert (await up.ask("POST", "/api/show", json={"model": "polite"})).status == 200
    assert {row["name"] for row in (await up.ask("GET", "/api/ps")).json["models"]} == {
        "spare:latest", "polite:latest", "rude:latest",
    }  # fmt: skip
    assert (await up.post(model="kind")).status == 404


async def test_an_adapter_goes_with_the_last_replica_of_its_base(deploy: Deploy) -> None:
    up = await deploy({"name": "spare", "adapters": [Adapter("polite")]})
    await up.drain(up.workers[0])
    refused = await up.post(model="polite")
    assert (refused.status, refused.error["code"]) == (503, "no_capacity")


async def test_models_that_come_and_go_need_no_new_pod(
    deploy: Deploy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_file, "PERIOD_S", 0.01)
    up = await deploy({"name": "spare"})
    file = tmp_path / "headrace.yaml"
    file.write_text("models: [{name: spare, engine: scripted}]\n")
    pod, models = up.state(), models_file.ModelsFile(file, {}, up.settings)
    following = asyncio.create_task(models.follow(lambda changed: setattr(pod, "settings", changed)))
    assert (await up.post(model="other", max_tokens=3)).status == 404
    file.write_text("models: [{name: spare, engine: scripted, aliases: [other]}]\n")
    await eventually(lambda: pod.settings.models[0].aliases)
    assert (await up.post(model="other", max_tokens=3)).status == 200
    file.write_text("models: [{name: another, engine: scripted}]\n")
    await eventually(lambda: pod.settings.models[0].name == "another")
    assert (await up.post(model="spare", max_tokens=3)).status == 404
    following.cancel()
