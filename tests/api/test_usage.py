"""What an owner has used, as it may ask itself."""

from __future__ import annotations

import hashlib
from typing import Any

from headrace.broker.api_keys import KeySettings
from headrace.broker.limits import Limits
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment
from tests.support import eventually


def a_key(owner: str, **fields: Any) -> KeySettings:
    return KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest(), **fields)


async def usage(up: Deployment, owner: str, query: str = "") -> Any:
    answer = await up.ask("GET", f"/v1/usage{query}", headers={"authorization": f"Bearer {owner}"})
    assert answer.status == 200
    return answer.json


async def test_an_owner_sees_its_own_usage_and_limits_and_nobody_elses(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key("alice", limits=Limits(max_jobs=3)), a_key("bob")], shards=2)
    for _ in range(3):
        await up.post(headers={"authorization": "Bearer alice"}, max_tokens=5)
    [row] = (said := await usage(up, "alice"))["data"]
    assert (row["model"], row["requests"], row["prompt_tokens"], row["completion_tokens"]) == ("scripted", 3, 3, 15)
    assert (said["owner"], said["limits"], said["owner_limits"]) == ("alice", {"max_jobs": 3}, {})
    assert (await usage(up, "bob", "?days=35"))["data"] == []
    refused = await up.ask("GET", "/v1/usage?days=0", headers={"authorization": "Bearer bob"})
    assert refused.error["param"] == "days"


async def test_i1_a_stream_that_was_cut_is_in_the_usage_as_far_as_it_came(deploy: Deploy) -> None:
    up = await deploy({"tokens_per_s": 50.0}, api={"grace_s": 0.0}, keys=[a_key("alice")])
    body = up.body(stream=True, max_tokens=500)
    url = up.pods[0].url + "/v1/chat/completions"
    async with up.http.stream("POST", url, json=body, headers={"authorization": "Bearer alice"}):
        await eventually(lambda: up.recorded.tokens >= 5)
    await eventually(up.is_idle)
    [row] = (await usage(up, "alice"))["data"]
    assert row["requests"] == 1 and 5 <= row["completion_tokens"] <= up.recorded.tokens < 100
