"""`/ops/events` and `/ops/snapshot`: one look a second for all who look, and none for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from headrace.broker import snapshot
from headrace.broker.errors import BrokerDown
from headrace.broker.settings import KeySettings
from headrace.broker.snapshot import Snapshot
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.api.reading import parse
from tests.support import eventually


@contextlib.asynccontextmanager
async def watching(up: Deployment, pod: int = 0) -> AsyncIterator[AsyncIterator[Any]]:
    """The snapshots as they come, decoded."""

    async def events(response: httpx.Response) -> AsyncIterator[Any]:
        read = b""
        async for data in response.aiter_raw():
            read += data
            *whole, read = read.split(b"\n\n")
            for event in whole:
                yield msgspec.json.decode(parse(event + b"\n\n")[0].data)

    async with up.http.stream("GET", f"{up.pods[pod].url}/ops/events") as response:
        assert response.headers["content-type"] == "text/event-stream"
        yield events(response)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that the broker is asked."""
    seen: list[None] = []
    real = snapshot.look

    async def counted(*args: Any) -> Snapshot:
        seen.append(None)
        return await real(*args)

    monkeypatch.setattr(snapshot, "look", counted)
    return seen


def is_at_work(seen: dict[str, Any]) -> bool:
    """One stream, as each of those that publish something of it says."""
    [model], [replica], [pod] = seen["models"], seen["replicas"], seen["pods"]
    return (model["running"], replica["running"], pod["streams"]) == (1, 1, 1) and model["tokens_per_s"] > 0


async def test_it_shows_what_is_there_and_what_was_done(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 100.0})
    async with watching(up) as events:
        before = await anext(events)
        assert (before["verdict"]["state"], len(before["replicas"]), len(before["pods"])) == ("well", 1, 1)
        async with up.open(max_tokens=2000) as stream:
            await stream.until(b"data:")
            running = before
            while not is_at_work(running):
                running = await anext(events)
        after = running
        while after["total"].get("cancellations") in (None, before["total"].get("cancellations")):
            after = await anext(events)
    once = (await up.ask("GET", "/ops/snapshot")).json
    assert once.keys() == after.keys()


async def test_many_who_look_cost_one_look_a_second_and_nobody_none(deploy: Deploy, looks: list[None]) -> None:
    up = await deploy(workers=0)
    async with contextlib.AsyncExitStack() as held:
        streams = [await held.enter_async_context(watching(up)) for _ in range(8)]
        seen = [await anext(stream) for stream in streams for _ in range(2)]
        assert len(seen) == 16
        assert len(looks) <= 3
    await eventually(lambda: not [task for task in asyncio.all_tasks() if task.get_name() == "watch"])
    count = len(looks)
    await up.ask("GET", "/ops/snapshot")
    assert len(looks) <= count + 1
    async with watching(up) as events:
        await anext(events)


async def test_a_broker_that_is_away_is_said_and_comes_back(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    up = await deploy(workers=0)
    real = snapshot.look
    is_away = True

    async def look(*args: Any) -> Snapshot:
        if is_away:
            raise BrokerDown("the broker is away")
        return await real(*args)

    monkeypatch.setattr(snapshot, "look", look)
    async with watching(up) as events:
        trouble = await anext(events)
        assert trouble["verdict"] == {
            "state": "failing",
            "reasons": [{"state": "failing", "text": "the broker is away"}],
        }
        assert (await up.ask("GET", "/ops/snapshot")).status == 503
        is_away = False
        assert "models" in await anext(events)


async def test_a_pod_that_drains_ends_the_stream(deploy: Deploy) -> None:
    up = await deploy(workers=0)
    async with watching(up) as events:
        await anext(events)
        up.state().drain()
        async with asyncio.timeout(5):
            assert len([event async for event in events]) <= 2


async def test_it_is_for_admins_and_its_page_for_all(deploy: Deploy) -> None:
    root = KeySettings("root", hashlib.sha256(b"open").hexdigest(), scopes=("use", "admin"))
    user = KeySettings("user", hashlib.sha256(b"mine").hexdigest())
    up = await deploy(workers=0, keys=[root, user])
    for path in ("/ops/events", "/ops/snapshot", "/v1/pods"):
        assert (await up.ask("GET", path)).status == 401
    for path in ("/", "/ops", "/assets/ops.js"):
        assert (await up.ask("GET", path, headers={"accept": "text/html"})).status == 200
    good = await up.ask("GET", "/ops/snapshot", headers={"authorization": "Bearer open"})
    poor = await up.ask("GET", "/ops/events", headers={"authorization": "Bearer mine"})
    assert poor.status == 403
    assert good.json["models"][0]["name"] == "scripted"
