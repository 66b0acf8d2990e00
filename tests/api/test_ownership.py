"""Jobs of others are not there: the same answer as for what never was, by the same work, on every route."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from websockets.asyncio.client import connect

from headrace.broker.api_keys import KeySettings
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment

OWNERS = [KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest()) for owner in ("alice", "bob")]
NOBODYS = "0000" + "5" * 28


def bearing(owner: str) -> dict[str, str]:
    return {"authorization": f"Bearer {owner}"}


def asks(job: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Every way to name a job."""
    chat = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
    position = f"{job}.1-1"
    return [
        ("GET", f"/v1/streams/{job}", {}),
        ("GET", f"/v1/streams/{job}?format=plain", {}),
        ("GET", f"/v1/streams/{job}?after={position}", {}),
        ("DELETE", f"/v1/streams/{job}", {}),
        ("GET", f"/v1/streams/{job}/status", {}),
        ("GET", f"/chat?after={position}", {}),
        ("POST", f"/v1/chat/completions?after={position}", {"json": chat}),
        ("POST", f"/api/chat?after={position}", {"json": chat}),
        ("GET", f"/v1/responses/resp_{job}", {}),
        ("GET", f"/v1/responses/resp_{job}?stream=true", {}),
        ("GET", f"/v1/responses/resp_{job}/input_items", {}),
        ("POST", f"/v1/responses/resp_{job}/cancel", {}),
        ("DELETE", f"/v1/responses/resp_{job}", {}),
        ("POST", "/v1/responses", {"json": {"model": "scripted", "input": "x", "previous_response_id": f"resp_{job}"}}),
    ]


def shown(answer: Answer, job: str) -> tuple[int, str, list[str]]:
    body = re.sub(rf"{job}|[0-9a-f]{{32}}", "-", answer.body.decode())
    return answer.status, body, sorted(name for name in answer.headers if name not in ("date", "content-length"))


async def test_what_is_anothers_is_answered_as_what_never_was(deploy: Deploy) -> None:
    up = await deploy(keys=OWNERS)
    body = {"model": "scripted", "input": "hi", "max_output_tokens": 3}
    made = await up.ask("POST", "/v1/responses", headers=bearing("alice"), json=body)
    job = made.json["id"].removeprefix("resp_")
    assert (await up.ask("GET", f"/v1/responses/resp_{job}", headers=bearing("alice"))).status == 200
    for (method, path, more), (_, nowhere, others) in zip(asks(job), asks(NOBODYS), strict=True):
        foreign = await up.ask(method, path, headers=bearing("bob"), **more)
        unknown = await up.ask(method, nowhere, headers=bearing("bob"), **others)
        assert foreign.status in (400, 404), path
        assert shown(foreign, job) == shown(unknown, NOBODYS), path
    assert [await said(up, each) for each in (job, NOBODYS)] == ["stream_not_found"] * 2
    status = await up.ask("GET", f"/v1/streams/{job}/status", headers=bearing("alice"))
    assert status.json["state"] == "done"


async def said(up: Deployment, job: str) -> str:
    url = up.pods[0].url.replace("http", "ws") + "/ws/chat"
    async with connect(url, additional_headers=bearing("bob")) as socket:
        await socket.send(json.dumps({"resume": f"{job}.1-1"}))
        return str(json.loads(await socket.recv())["error"]["code"])


async def test_idempotency_keys_of_different_owners_never_meet(deploy: Deploy) -> None:
    up = await deploy(keys=OWNERS)
    jobs = set()
    for owner in ("alice", "bob", "alice"):
        answer = await up.post(headers={**bearing(owner), "idempotency-key": "one"}, max_tokens=1)
        jobs.add(answer.headers["x-request-id"])
    assert len(jobs) == 2
