"""`headrace jobs`, against a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from typer.testing import CliRunner, Result

from headrace.broker.embedded import EmbeddedServer
from headrace.broker.errors import BadRequest, JobNotFound
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import QueueSettings, RedisSettings
from headrace.cli import jobs
from tests.broker.steps import admit, claim, end_of, serve


@pytest.fixture
async def broker(redis_server: EmbeddedServer, redis_client: redis.Redis) -> AsyncIterator[RedisBroker]:
    broker = RedisBroker(redis_server.url, RedisSettings(), QueueSettings(max_deaths=1))
    await broker.open()
    await serve(broker)
    yield broker
    await broker.close()


@pytest.fixture
def config(tmp_path: Path, redis_server: EmbeddedServer) -> Path:
    path = tmp_path / "headrace.yaml"
    url = redis_server.url_of("ops")
    path.write_text(f"models: [{{name: m, engine: scripted}}]\nredis: {{url: '{url}'}}\n", "utf-8")
    return path


async def run(config: Path, *args: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, jobs.app, [*args, "--config", str(config)])


async def said(config: Path, *args: str) -> str:
    result = await run(config, *args)
    assert result.exit_code == 0, result.output
    return result.stdout


async def kill(broker: RedisBroker) -> str:
    job_id = await admit(broker)
    await claim(broker)
    await broker.release("r", job_id, 1, "1-0", is_death=True)
    return job_id


async def test_dead_letters_are_listed(broker: RedisBroker, config: Path) -> None:
    assert await said(config, "dead") == "no dead letters\n"
    assert json.loads(await said(config, "dead", "--json")) == []
    job_id = await kill(broker)
    [row] = json.loads(await said(config, "dead", "--json"))
    assert row.pop("when").endswith("+00:00")
    assert row == {
        "id": job_id,
        "model": "m",
        "owner": "alice",
        "deaths": 1,
        "error": "engine_hung",
        "worker": "r",
    }
    assert job_id in await said(config, "dead")


async def test_a_dead_letter_is_put_back_as_a_new_job(broker: RedisBroker, config: Path) -> None:
    job_id = await kill(broker)
    new_id = (await said(config, "requeue", job_id)).strip()
    assert (await claim(broker)).job.id == new_id != job_id
    assert json.loads(await said(config, "dead", "--json")) == []
    assert (await end_of(broker, job_id))[1] == "failed"


async def test_dead_letters_expire_when_told(broker: RedisBroker, config: Path) -> None:
    first, second, third = [await kill(broker) for _ in range(3)]
    assert await said(config, "expire", second) == "1 expired\n"
    assert {row["id"] for row in json.loads(await said(config, "dead", "--json"))} == {first, third}
    assert await said(config, "expire", "--all") == "2 expired\n"
    assert await said(config, "dead") == "no dead letters\n"


@pytest.mark.parametrize("args", [(), ("0" * 32, "--all")])
async def test_expire_wants_one_or_all(config: Path, args: tuple[str, ...]) -> None:
    assert (await run(config, "expire", *args)).exit_code == 2


async def test_any_job_is_shown(broker: RedisBroker, config: Path) -> None:
    waiting, dead = await admit(broker, band="batch"), await kill(broker)
    shown = json.loads(await said(config, "show", waiting))
    assert (shown["id"], shown["state"], shown["ahead"], shown["band"]) == (waiting, "waiting", 0, "batch")
    assert (shown["model"], shown["owner"], shown["format"], shown["dead"]) == ("m", "alice", "openai.chat", None)
    shown = json.loads(await said(config, "show", dead))
    assert (shown["state"], shown["deaths"], shown["dead"]["error"]) == ("failed", 1, "engine_hung")


@pytest.mark.parametrize("verb", ["requeue", "expire", "show"])
async def test_what_is_not_there_is_told(broker: RedisBroker, config: Path, verb: str) -> None:
    assert isinstance((await run(config, verb, "0" * 32)).exception, JobNotFound)
    assert isinstance((await run(config, verb, "nonsense")).exception, BadRequest)
