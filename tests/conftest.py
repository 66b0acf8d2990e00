"""One Redis server for the whole run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator

import hypothesis
import pytest
import redis

from tests.users import Server

# speed is never asserted, nor is that of making examples
hypothesis.settings.register_profile("headrace", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("headrace")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Server]:
    """The embedded server; its child belongs to a loop of its own, which outlives those of the tests."""
    with tempfile.TemporaryDirectory(prefix="hr-") as data_dir, asyncio.Runner() as runner:
        server = Server(data_dir)
        runner.run(server.start())
        yield server
        runner.run(server.stop())


@pytest.fixture
def redis_client(redis_server: Server) -> Iterator[redis.Redis]:
    """A client that may do anything, on an empty server."""
    with redis.Redis.from_url(redis_server.root_url, protocol=2) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory-policy", "noeviction")
