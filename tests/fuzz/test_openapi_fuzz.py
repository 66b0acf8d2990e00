"""Requests made of the pod's own `/openapi.json`, such as it allows and such as it does not, against a running pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, given
from hypothesis.errors import Unsatisfiable

from tests.api.conftest import Deploy, deploy, pytest_asyncio_loop_factories

if "CI" not in os.environ:
    pytest.importorskip("schemathesis")

import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance

__all__ = ["deploy", "pytest_asyncio_loop_factories"]  # fixtures

EXAMPLES = 2
"""Of each mode and operation; some 300 requests in all."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


async def test_what_the_document_allows_or_forbids_never_breaks_a_pod(
    deploy: Deploy, caplog: pytest.LogCaptureFixture
) -> None:
    up = await deploy({"context_tokens": 200, "tokens_per_s": 0.0}, queue={"queue_timeout_s": 5.0})
    document = (await up.ask("GET", "/openapi.json")).json
    with caplog.at_level(logging.ERROR):
        await asyncio.to_thread(_ask_everything, document, up.pods[0].url)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    answer = await up.post(max_tokens=3)
    assert answer.status == 200


def _ask_everything(document: dict[str, Any], url: str) -> None:
    schema: Any = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in MODES:
            with contextlib.suppress(Unsatisfiable):  # what takes nothing cannot be asked wrongly
                _of(operation, mode, {})()
        _of(operation, GenerationMode.POSITIVE, {"headers": {}, "query": {}})()


def _of(operation: Any, mode: GenerationMode, fixed: dict[str, Any]) -> Callable[[], None]:
    @hypothesis.seed(1)
    @hypothesis.settings(
        max_examples=EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck), phases=_PHASES
    )
    @given(operation.as_strategy(generation_mode=mode, **fixed))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "scripted"  # any other name is refused at once
        response = case.call(timeout=10)
        case.validate_response(response, checks=[not_a_server_error, content_type_conformance])
        assert b"Traceback" not in response.content
        if response.status_code >= 400 and response.content:
            assert "error" in json.loads(response.content)

    run: Callable[[], None] = ask
    return run


_PHASES = (hypothesis.Phase.generate,)
