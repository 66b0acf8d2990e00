"""The deployment, node and Chromium; what is missing skips on a laptop and fails in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from headrace.broker.embedded import EmbeddedServer
from tests.chromium import browser
from tests.clients.deployment import Deployment
from tests.clients.node import Node, node_program
from tests.system.conftest import MakeMachine, machines

__all__ = ["browser"]

make_machine = pytest.fixture(scope="session")(machines)

HERE = Path(__file__).parent


_OTHERS_WARNINGS = ("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""Clients leave connections to the garbage collector; ours run in processes of their own here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == HERE:
            for warning in _OTHERS_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def world(redis_server: EmbeddedServer, make_machine: MakeMachine) -> Iterator[Deployment]:
    machine = make_machine(Deployment.settings(redis_server.url), pods=2)
    deployment = Deployment(machine, redis_server.url)
    deployment.start()
    yield deployment
    deployment.close()


@pytest.fixture(scope="session")
def node(world: Deployment) -> Node:
    """Scripts in node, with the packages of package.json."""
    try:
        return Node(node_program(), world.urls)
    except FileNotFoundError as error:
        _missing(str(error))


def _missing(what: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)
