"""G3: nothing that a client says becomes a label, so that no client can make Prometheus grow."""

from __future__ import annotations

import asyncio
import uuid

import httpx

from tests.observability.watched import CHAT, Watched
from tests.system.conftest import until

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "PROPFIND")
REQUESTS = 1000


def series(text: str) -> set[str]:
    return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}


async def ask(url: str) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        for number in range(REQUESTS // 10):
            name = str(uuid.uuid4())
            headers = {"authorization": f"Bearer {name}", "x-request-id": name, "x-api-key": name}
            body = {"model": name, "user": name, "messages": [{"role": "user", "content": name}]}
            match number % 5:
                case 0:
                    await http.request(METHODS[number % len(METHODS)], f"{url}/x/{name}", headers=headers)
                case 1:
                    await http.get(f"{url}/v1/streams/{name.replace('-', '')}", headers=headers)
                case 2:
                    await http.get(f"{url}/v1/responses/resp_{name.replace('-', '')}", headers=headers)
                case _:
                    await http.post(url + CHAT, json=body, headers=headers)


async def test_g3_a_thousand_requests_of_strangers_make_no_new_series(watched: Watched) -> None:
    until(lambda: watched.load.rounds >= 3, 60)
    url = watched.machine.urls[0]
    async with httpx.AsyncClient() as http:
        before = series((await http.get(f"{url}/metrics")).text)
        await asyncio.gather(*(ask(url) for _ in range(10)))
        answer = await http.get(f"{url}/metrics")
    grown = series(answer.text) - before
    assert len(grown) <= 20, grown
    assert len(answer.content) < 200_000
