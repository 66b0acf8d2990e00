"""Wait until a deployment can take load: every pod says so, and a replica of the model is there."""

from __future__ import annotations

import asyncio

import httpx

from headrace.broker.errors import BrokerDown, Unavailable
from headrace.broker.redis_broker import RedisBroker
from headrace.broker.settings import Settings
from headrace.cli import options
from headrace.cli.load_plan import Plan

_ASK_S = 0.2


async def wait_ready(settings: Settings, plan: Plan, within_s: float) -> None:
    """Returns when everything is ready; raises Unavailable, which names what is not, after `within_s`."""
    broker, deadline = options.broker_of(settings, "ops"), asyncio.get_running_loop().time() + within_s
    try:
        async with httpx.AsyncClient() as http:
            while missing := await _missing(broker, plan, http):
                if asyncio.get_running_loop().time() > deadline:
                    raise Unavailable(f"not ready after {within_s:g} s: {', '.join(missing)}")
                await asyncio.sleep(_ASK_S)
    finally:
        await broker.close()


async def _missing(broker: RedisBroker, plan: Plan, http: httpx.AsyncClient) -> list[str]:
    missing = [url for url in plan.urls if not await _is_ready(http, url)]
    try:
        replicas = (await broker.listing("replicas")).values()
    except BrokerDown:
        return [*missing, "the broker"]
    if not any(row.get("model") == plan.model and row.get("state") == "ready" for row in replicas):
        missing.append(f"a replica of {plan.model}")
    return missing


async def _is_ready(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/readyz")).status_code == 200
    except httpx.TransportError:
        return False
