"""Case I2: every address asks for the key; and what a key may."""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any

import pytest
import redis
from fastapi import APIRouter
from fastapi.routing import APIRoute, APIWebSocketRoute
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from headrace.api import auth
from headrace.api.access import access_of
from headrace.api.app import create_app
from headrace.api.routes import ROUTERS
from headrace.broker.api_keys import KeySettings
from headrace.broker.memory import MemoryBroker
from headrace.broker.models import ScriptedModel
from headrace.broker.settings import Settings
from tests.api.conftest import Deploy
from tests.api.deployment import Deployment

TOKEN = "sk-right-9431"
KEY = KeySettings("alice", hashlib.sha256(TOKEN.encode()).hexdigest())
SETTINGS = Settings([ScriptedModel(name="scripted")], keys=[KEY])
OPEN = {"/healthz", "/readyz", "/health", "/openapi.json"}

WRONG: list[list[tuple[str, str]]] = [
    [],
    [("authorization", "Bearer wrong")],
    [("authorization", f"Bearer {TOKEN[:-1]}")],
    [("authorization", f"Bearer {TOKEN}x")],
    [("authorization", f"Bearer  {TOKEN}")],
    [("authorization", TOKEN)],
    [("authorization", f"Basic {TOKEN}")],
    [("authorization", "Basic dTpzay1yaWdodC05NDMx")],  # u:sk-right-9431
    [("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")],
    [("x-api-key", TOKEN[:-1])],
    [("x-api-key", TOKEN), ("x-api-key", TOKEN)],
]


def routes() -> list[Any]:
    return list(create_app(SETTINGS, MemoryBroker(SETTINGS.queue)).state.routes)


def closed() -> list[tuple[str, str]]:
    """Method and path of every route that is not open to all."""
    found = {
        (method, re.sub(r"{[^}]*}", "0" * 32, route.path))
        for route in routes()
        if isinstance(route, APIRoute) and access_of(route.path) != "open"
        for method in route.methods or ()
    }
    return sorted(found)


def test_what_is_open_is_listed_here_and_nothing_else_is() -> None:
    assert {route.path for route in routes() if access_of(route.path) == "open"} <= OPEN | {"/ops"} | {
        path for path in (route.path for route in routes()) if path.startswith("/assets/")
    }


def test_there_is_no_application_with_a_route_without_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    def router(_: object) -> APIRouter:
        made = APIRouter()
        made.add_api_route("/new", lambda: None)
        return made

    monkeypatch.setattr("headrace.api.app.ROUTERS", (*ROUTERS, router))
    with pytest.raises(RuntimeError, match=r"GUARD.*/new"):
        routes()


async def test_i2_every_address_refuses_every_wrong_key(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=[KEY])
    assert len(closed()) > 40

    async def ask(method: str, path: str, headers: list[tuple[str, str]]) -> None:
        answer = await up.ask(method, path, headers=headers, params={"key": TOKEN, "api_key": TOKEN}, json={})
        assert answer.status == 401, (method, path, headers)
        assert "bearer" in answer.headers["www-authenticate"].lower()
        if method != "HEAD":
            assert answer.json.keys() & {"error"} and "detail" not in answer.json
            assert TOKEN[:-1] not in answer.body.decode()

    for headers in WRONG:
        refused = [each for each in closed() if access_of(each[1]) != "metrics" or headers != WRONG[7]]
        await asyncio.gather(*(ask(method, path, headers) for method, path in refused))
    assert await up.is_idle() and not redis_client.keys("hr:*:job:*") and not up.recorded.told


async def test_i2_tricks_with_the_path_and_the_method_do_not_help(deploy: Deploy) -> None:
    up = await deploy(keys=[KEY])
    for method, path in closed():
        tricks = [(method, f"/{path}"), (method, path.upper()), (method, path + "%2e"), (method, path + "%2f")]
        tricks += [("OPTIONS", path), ("TRACE", path), (method, f"/x/..{path}"), (method, path + ";a=b")]
        tricks += [(method, path + "/")]
        for trick in tricks:
            answer = await up.ask(*trick)
            is_moved = answer.status == 307 and answer.headers["location"].rstrip("/").endswith(path.rstrip("/"))
            assert answer.status == 401 or is_moved or trick[1] == path, trick
    assert (await up.ask("GET", "/nothing/here")).status == 401
    assert (await up.ask("GET", "/nothing/here", headers=bearing(TOKEN))).status == 404


def bearing(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_i2_a_websocket_is_refused_before_it_is_accepted(deploy: Deploy, redis_client: redis.Redis) -> None:
    up = await deploy(keys=[KEY])
    sockets = [route for route in routes() if isinstance(route, APIWebSocketRoute)]
    assert [route.path for route in sockets] == ["/ws/chat"]
    for headers in ([], [("authorization", "Bearer wrong")], [("x-api-key", TOKEN[:-1])]):
        for offered in (["headrace"], ["headrace", "bearer.wrong"], ["bearer.wrong", "bearer.wrong2"]):
            with pytest.raises(InvalidStatus) as caught:
                await connect(
                    up.pods[0].url.replace("http", "ws") + "/ws/chat",
                    additional_headers=headers,
                    subprotocols=offered,  # type: ignore[arg-type]  # they are texts
                )
            assert caught.value.response.status_code == 401
    assert not redis_client.keys("hr:*:job:*")


async def test_every_way_to_send_a_key_is_taken(deploy: Deploy) -> None:
    up = await deploy(keys=[KEY])
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await up.ask("GET", "/v1/models", headers={"authorization": f"{scheme} {TOKEN}"})).status == 200
    assert (await up.ask("GET", "/v1/models", headers={"x-api-key": TOKEN})).status == 200
    for path in OPEN:
        assert (await up.ask("GET", path)).status == 200


# -- scopes -----------------------------------------------------------------------------------------------------------


def a_key(owner: str, **fields: Any) -> KeySettings:
    return KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest(), **fields)


async def test_metrics_need_their_scope_and_prometheus_may_send_it_as_a_password(deploy: Deploy) -> None:
    up = await deploy(workers=0, keys=[a_key("prom", scopes=("metrics",)), a_key("user")])
    assert (await up.http.get(up.pods[0].url + "/metrics", auth=("any", "prom"))).status_code == 200
    assert (await up.ask("GET", "/metrics", headers=bearing("prom"))).status == 200
    refused = await up.ask("GET", "/metrics", headers=bearing("user"))
    assert (refused.status, refused.error["code"]) == (403, "permission_denied")
    assert (await up.ask("GET", "/v1/models", headers=bearing("prom"))).status == 403
    assert (await up.http.get(up.pods[0].url + "/v1/models", auth=("any", "user"))).status_code == 401


async def test_metrics_can_be_open(deploy: Deploy) -> None:
    up = await deploy(workers=0, keys=[KEY], api={"open_metrics": True})
    assert (await up.ask("GET", "/metrics")).status == 200
    assert (await up.ask("GET", "/v1/models")).status == 401


async def test_a_key_may_be_for_some_addresses_and_always_for_its_own_jobs(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key("alice", routes=["/api", "/v1/chat/completions"])])
    begun = await up.stream(headers=bearing("alice"), max_tokens=2)
    assert begun.status == 200
    assert (await up.ask("GET", f"/v1/streams/{begun.headers['x-request-id']}", headers=bearing("alice"))).status == 200
    assert (await up.ask("GET", "/api/tags", headers=bearing("alice"))).status == 200
    for path in ("/v1/completions", "/apiary", "/v1/chat", "/completion"):
        assert (await up.ask("POST", path, headers=bearing("alice"), json={})).status in (403, 404), path
    assert (await up.post("completions", headers=bearing("alice"))).error["code"] == "permission_denied"


async def test_models_that_a_key_may_not_use_are_not_there_for_it(deploy: Deploy) -> None:
    up = await deploy(keys=[a_key("alice", models=["other"]), a_key("bob", models=["scripted"])])
    refused = await up.post(headers=bearing("alice"))
    assert (refused.status, refused.error["code"]) == (404, "model_not_found")
    assert await names(up, "alice") == ([], []) and await names(up, "bob") == (["scripted"], ["scripted:latest"])
    for path in ("/props", "/info", "/v1/models/scripted"):
        assert (await up.ask("GET", path, headers=bearing("alice"))).status == 404
    assert (await up.post(headers=bearing("bob"), max_tokens=1)).status == 200


async def names(up: Deployment, owner: str) -> tuple[list[str], list[str]]:
    openai = (await up.ask("GET", "/v1/models", headers=bearing(owner))).json["data"]
    ollama = (await up.ask("GET", "/api/tags", headers=bearing(owner))).json["models"]
    return [each["id"] for each in openai], [each["name"] for each in ollama]


def test_the_guard_is_a_dependency_of_every_route() -> None:
    assert auth.unguarded(routes()) == []
