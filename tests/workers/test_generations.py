"""The log of complete generations: nothing unless it is asked for, whole answers, and only what may be written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.errors import ConfigError
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import GenerationLogSettings
from headrace.workers.engines.scripted import ScriptedEngine
from headrace.workers.generations import opened
from tests.support import eventually
from tests.workers.replicas import MakeStage, Replica, Stage, oracle_text


def scripted(tokens_per_s: float = 0.0) -> ScriptedEngine:
    return ScriptedEngine(ScriptedModel(name="m", tokens_per_s=tokens_per_s))


def no_digits(text: str) -> str:
    return "".join("#" if char.isdigit() else char for char in text)


def forgetful(text: str) -> None:
    """A hook that returns nothing."""


async def a_replica(stage: Stage, engine: ScriptedEngine | None = None, **settings: Any) -> Replica:
    replica = await stage.replica(engine or scripted())
    replica.worker._generations = opened(GenerationLogSettings(**settings), replica.worker.id)
    return replica


def lines(folder: Path, replica: Replica, suffix: str = "") -> list[dict[str, Any]]:
    file = folder / f"{replica.worker.id}.jsonl{suffix}"
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


async def test_a_generation_is_one_line(stage: Stage, tmp_path: Path) -> None:
    replica = await a_replica(stage, folder=str(tmp_path / "log"))
    job_id = await stage.admit("hello", max_tokens=700, n=2)
    await stage.ended(job_id)
    await eventually(lambda: lines(tmp_path / "log", replica))
    [line] = lines(tmp_path / "log", replica)
    assert line.pop("at_ms") > 0
    assert line == {
        "request_id": job_id, "model": "m", "prompt": "hello",
        "texts": [oracle_text("hello", 700), oracle_text("hello", 700, choice=1)], "reasoning": ["", ""],
    }  # fmt: skip
    [file] = (tmp_path / "log").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_the_answer_of_two_workers_is_one(make_stage: MakeStage, tmp_path: Path) -> None:
    stage = await make_stage(drain_s=0.05)
    former = await a_replica(stage, scripted(tokens_per_s=200), folder=str(tmp_path))
    job_id = await stage.admit(max_tokens=100)

    async def is_under_way() -> bool:
        return len(await stage.text(job_id)) > 90

    await eventually(is_under_way)
    await former.drain()
    assert lines(tmp_path, former) == []
    replica = await a_replica(stage, folder=str(tmp_path))
    await stage.ended(job_id)
    await eventually(lambda: lines(tmp_path, replica))
    assert lines(tmp_path, replica)[0]["texts"] == [oracle_text("hello", 100)]


async def test_the_hook_decides_what_is_written(stage: Stage, tmp_path: Path) -> None:
    replica = await a_replica(stage, folder=str(tmp_path), redact=f"{__name__}:no_digits")
    await stage.ended(await stage.admit("my number is 12345", max_tokens=3))
    await eventually(lambda: lines(tmp_path, replica))
    [line] = lines(tmp_path, replica)
    assert line["prompt"] == "my number is #####"
    assert line["texts"] == [no_digits(oracle_text("my number is 12345", 3))]


async def test_a_hook_that_fails_writes_nothing_and_fails_nobody(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    replica = await a_replica(stage, folder=str(tmp_path), redact=f"{__name__}:forgetful")
    assert (await stage.ended(await stage.admit(max_tokens=3))).status == "done"
    await eventually(lambda: bool(caplog.records))
    assert [record.__dict__["event"] for record in caplog.records] == ["generation_log_failed"]
    assert lines(tmp_path, replica) == []


async def test_files_are_put_away_by_size(stage: Stage, tmp_path: Path) -> None:
    replica = await a_replica(stage, folder=str(tmp_path), max_bytes=1, files=2)
    ids = []
    for place in range(5):
        ids.append(await stage.admit(max_tokens=1))
        await stage.ended(ids[-1])
        await eventually(lambda: [line["request_id"] for line in lines(tmp_path, replica)] == ids[-1:])
        assert len(os.listdir(tmp_path)) == min(place + 1, 3)
    assert [lines(tmp_path, replica, suffix)[0]["request_id"] for suffix in (".2", ".1", "")] == ids[2:]


def test_what_cannot_be_done_is_said_at_the_start(tmp_path: Path) -> None:
    assert opened(GenerationLogSettings(), "r") is None
    for redact in ("nowhere:f", "json:nothing", "json", "json:__name__"):
        with pytest.raises(ConfigError, match=r"generation_log\.redact"):
            opened(GenerationLogSettings(folder=str(tmp_path), redact=redact), "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"generation_log\.folder"):
        opened(GenerationLogSettings(folder=str(tmp_path / "file")), "r")
