"""Pages of other origins: they may not, unless they are listed; and a list costs nothing else."""

from __future__ import annotations

import asyncio

import pytest
from websockets.exceptions import InvalidStatus

from headrace.broker.errors import ConfigError
from headrace.broker.settings import load
from tests.api.conftest import Deploy
from tests.api.test_websocket import talk
from tests.support import eventually

LISTED = "https://app.example.org"


async def test_a_page_of_another_origin_cannot_open_a_websocket(deploy: Deploy) -> None:
    up = await deploy()
    own = up.pods[0].url
    for origin in (LISTED, "null", "http://127.0.0.1", own + ".example.org", "", "http://[", "x"):
        with pytest.raises(InvalidStatus) as caught:
            async with talk(up, additional_headers={"origin": origin}):
                pass
        assert caught.value.response.status_code == 403
    for headers in ({}, {"origin": own}, {"origin": own.replace("http:", "https:")}):
        async with talk(up, additional_headers=headers) as ws:
            await ws.say(prompt="hi", max_tokens=1)
            assert await ws.end() == 1000


@pytest.mark.parametrize("listed", [LISTED, "*"])
async def test_one_of_a_listed_origin_can(deploy: Deploy, listed: str) -> None:
    up = await deploy(api={"origins": [listed]})
    async with talk(up, additional_headers={"origin": LISTED}) as ws:
        await ws.say(prompt="hi", max_tokens=1)
        assert await ws.end() == 1000


async def test_cors_is_off_by_default(deploy: Deploy) -> None:
    up = await deploy()
    answer = await up.stream(headers={"origin": LISTED}, max_tokens=1)
    assert not any(name.startswith("access-control") for name in answer.headers)


async def test_cors_lets_listed_pages_resume_and_see_the_job(deploy: Deploy) -> None:
    up = await deploy(api={"origins": [LISTED]})
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "last-event-id,authorization"}
    asked = await up.ask("OPTIONS", "/v1/chat/completions", headers={"origin": LISTED, **asking})
    assert asked.status == 200 and "last-event-id" in asked.headers["access-control-allow-headers"].lower()
    for answer in (
        await up.stream(headers={"origin": LISTED}, max_tokens=1),
        await up.ask("GET", "/chat?prompt=", headers={"origin": LISTED}),
    ):
        assert answer.headers["access-control-allow-origin"] == LISTED
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
    other = await up.stream(headers={"origin": "https://other.example.org"}, max_tokens=1)
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("is_stream", [True, False])
async def test_d4_a_client_that_leaves_is_noticed_with_cors_too(deploy: Deploy, is_stream: bool) -> None:
    up = await deploy({"slots": 1, "tokens_per_s": 20.0}, api={"origins": [LISTED], "grace_s": 0})
    body = up.body(max_tokens=10_000, stream=is_stream)
    async with talk(up):  # an open connection beside it changes nothing
        request = up.http.build_request(
            "POST", up.pods[0].url + "/v1/chat/completions", json=body, headers={"origin": LISTED}
        )
        asking = asyncio.create_task(up.http.send(request, stream=True))
        await eventually(lambda: up.recorded.told)
        if is_stream:
            await (await asking).aclose()
        else:
            asking.cancel()
        await eventually(lambda: up.workers[0].running == 0, 3.0)


@pytest.mark.parametrize("origin", ["https://a.org/", "a.org", "https://a.org/x", "https://A.org", ""])
def test_an_origin_that_no_browser_would_send_is_a_clear_error(tmp_path: object, origin: str) -> None:
    path = f"{tmp_path}/headrace.yaml"
    with open(path, "w") as file:
        file.write("models: [{name: m, engine: scripted}]\n")
    with pytest.raises(ConfigError, match=r"api\.origins"):
        load(path, {"HEADRACE_API__ORIGINS": f"['{origin}']"})
    settings = load(path, {"HEADRACE_API__ORIGINS": "['https://a.org', 'http://localhost:3000', 'null']"})
    assert len(settings.api.origins) == 3
