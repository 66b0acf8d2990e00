"""The turns of a conversation are on one shard, over two pods, and their prefixes reach the queue."""

from __future__ import annotations

from headrace.broker import keys
from tests.api.conftest import Deploy
from tests.api.deployment import Answer, Deployment

PATH = "/v1/chat/completions"


def body(*turns: str) -> dict[str, object]:
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return {"model": "scripted", "max_tokens": 2, "messages": messages}


async def asked(up: Deployment, pod: int, asks: dict[str, object], session: str = "") -> Answer:
    headers = {"x-session-id": session} if session else {}
    answer = await up.http.post(f"{up.pods[pod].url}{PATH}", json=asks, headers=headers)
    assert answer.status_code == 200
    return Answer(answer.status_code, answer.headers, answer.content)


def shard(answer: Answer) -> int:
    return keys.shard_of(answer.headers["x-request-id"])


async def test_a_session_that_is_named_stays_on_one_shard(deploy: Deploy) -> None:
    up = await deploy(pods=2, shards=8)
    shards = {
        session: {shard(await asked(up, pod, body("hi"), session)) for pod in (0, 1, 0, 1)} for session in "abcdefgh"
    }
    assert all(len(found) == 1 for found in shards.values())
    assert len(set.union(*shards.values())) > 1


async def test_a_long_conversation_stays_on_one_shard_by_its_first_messages(deploy: Deploy) -> None:
    up = await deploy(pods=2, shards=8)
    first = "x" * 2000
    turns = [body(first), body(first, "yes", "and then?"), body(first, "yes", "and then?", "no", "why?")]
    assert len({shard(await asked(up, pod, turn)) for turn in turns for pod in (0, 1)}) == 1
    assert len({shard(await asked(up, 0, body(f"{number}" + first))) for number in range(12)}) > 1


async def test_short_prompts_are_spread_over_the_shards(deploy: Deploy) -> None:
    up = await deploy(shards=8)
    assert len({shard(await asked(up, 0, body("hi"))) for _ in range(24)}) > 2


async def test_what_was_cached_is_in_the_usage(deploy: Deploy) -> None:
    up = await deploy({"cache_tokens": 10_000}, pods=2, workers=3)
    usages = [(await asked(up, turn % 2, body("x" * 8000))).json["usage"] for turn in range(4)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached == [0, 1999, 1999, 1999]
