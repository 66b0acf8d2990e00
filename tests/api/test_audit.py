"""What is noted of refused logins and of what admins do."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import pytest
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth import GUARD
from headrace.api.pod import Pod
from headrace.api.routes import ROUTERS
from headrace.broker.api_keys import KeySettings
from tests.api.conftest import Deploy


def a_key(owner: str, **fields: Any) -> KeySettings:
    return KeySettings(owner, hashlib.sha256(owner.encode()).hexdigest(), **fields)


def bearing(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_refused_logins_are_noted_now_and_then_and_counted(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    up = await deploy(workers=0, keys=[a_key("alice")])
    caplog.set_level(logging.WARNING, "httpx")  # the test's own end
    caplog.set_level(logging.INFO)
    for number in range(30):
        assert (await up.ask("GET", "/v1/models?key=MARKED", headers=bearing(f"MARKED-{number}"))).status == 401
    [noted] = await up.broker.ledger.notes(10)
    assert (noted.entry.actor, noted.entry.action) == ("127.0.0.1", "invalid_api_key")
    assert noted.entry.subject == "GET /v1/models"
    lines = [record for record in caplog.records if record.__dict__.get("event") == "audit"]
    assert len(lines) == 1 and "MARKED" not in caplog.text
    up.state().audit._quiet_until = 0.0
    assert (await up.ask("GET", "/metrics", headers=bearing("alice"))).status == 403
    [noted, _] = await up.broker.ledger.notes(10)
    assert noted.entry.actor == f"alice (key {a_key('alice').id}) at 127.0.0.1"
    assert (noted.entry.action, noted.entry.detail) == ("permission_denied", "30 since the last note")


async def test_what_admins_do_is_noted_and_what_they_look_at_is_not(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def router(_: Pod) -> APIRouter:
        routes = APIRouter(prefix="/ops", dependencies=[GUARD])

        @routes.api_route("/thing/{id}", methods=["GET", "DELETE"])
        async def thing(request: Request, id: str) -> Response:
            return Response(status_code=204)

        return routes

    monkeypatch.setattr("headrace.api.app.ROUTERS", (*ROUTERS, router))
    up = await deploy(workers=0, keys=[a_key("alice", scopes=("admin",)), a_key("bob")])
    assert (await up.ask("GET", "/ops/thing/7", headers=bearing("alice"))).status == 204
    assert await up.broker.ledger.notes(10) == []
    assert (await up.ask("DELETE", "/ops/thing/7", headers=bearing("alice"))).status == 204
    [noted] = await up.broker.ledger.notes(10)
    assert (noted.entry.action, noted.entry.subject) == ("admin", "DELETE /ops/thing/7")
    assert noted.entry.actor.startswith("alice (key ")
    assert (await up.ask("DELETE", "/ops/thing/7", headers=bearing("bob"))).status == 403
    assert (await up.ask("DELETE", "/ops/thing/7")).status == 401
