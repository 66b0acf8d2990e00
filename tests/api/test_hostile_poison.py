"""A request that takes its workers down is taken no more: it would take down one replica after another."""

from __future__ import annotations

import asyncio
import hashlib

from headrace.broker.settings import KeySettings
from tests.api.by_hand import HandWorker
from tests.api.conftest import Deploy
from tests.support import eventually

KEYS = [KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest()) for owner in ("alice", "bob")]
ALICE, BOB = ({"authorization": f"Bearer {owner}"} for owner in ("alice", "bob"))


async def test_a_body_that_ended_in_the_dead_letters_is_refused_to_its_owner_on_every_pod(deploy: Deploy) -> None:
    up = await deploy(queue={"max_deaths": 1}, workers=0, pods=2, keys=KEYS)
    hand = HandWorker(up)
    await hand.serve()
    asking = asyncio.create_task(up.post(headers=ALICE, max_tokens=5))
    killed = await hand.claim()
    assert await up.broker.release("hand", killed.id, 1, "1-1", is_death=True) == "ok"
    assert (await asking).error["code"] == "too_many_deaths"
    for pod in (0, 1):
        answer = await up.post(pod=pod, headers=ALICE, max_tokens=5)
        assert (answer.status, answer.error["code"]) == (422, "request_poisoned")
        assert 0 < int(answer.headers["retry-after"]) <= 3600
    for headers, max_tokens in ((BOB, 5), (ALICE, 6)):
        asking = asyncio.create_task(up.post(headers=headers, max_tokens=max_tokens))
        await hand.claim()
        await hand.end()
        assert (await asking).status == 200
    await eventually(up.is_idle)
