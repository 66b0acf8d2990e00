"""Values at the ends of their ranges on a real llama.cpp: other servers' processes have ended on some of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.errors import BadRequest
from headrace.broker.messages import Grammar, JsonSchema, Regex, Sampling
from headrace.workers.engines.llamacpp import LlamacppEngine
from tests.workers.llamacpp_runs import DATA_DIR, PARIS, Stream, begin, default_model

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX = 2**63 - 1
EXTREMES: list[dict[str, Any]] = [
    *({"temperature": value} for value in (0, 1e-45, 1e-38, 1e-300, 1e-3, 100)),
    *({"top_p": value} for value in (0, 1e-45, 1e-300, 1)),
    *({"min_p": value} for value in (1e-45, 1)),
    *({"typical_p": value} for value in (0, 1e-45, 1e-9)),
    *({"repeat_penalty": value} for value in (0, 1e-9, 1e-45, 100)),
    *({"repeat_penalty": 1.1, "repeat_last_n": value} for value in (0, -1, 2**31 - 1, MAX)),
    *({"frequency_penalty": value, "presence_penalty": value} for value in (-100, 100)),
    *({"top_k": value} for value in (-MAX, -1, 1, 2**31, MAX)),
    *({"seed": value} for value in (-(2**63), -1, 2**32 - 1, 2**32, MAX)),
    *({"logit_bias": {5: value}} for value in (-1e9, 1e9, -1e-300)),
    {"logit_bias": {2**31 - 1: 100.0}},
    {"logit_bias": dict.fromkeys(range(1024), -1e9)},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamacppEngine]:
    engine = LlamacppEngine(default_model(), DATA_DIR)
    await engine.load(lambda what, share: None)
    yield engine
    await engine.close()


async def settled(stream: Stream) -> None:
    await stream.until(lambda: stream.end or stream.errors)


@pytest.mark.parametrize("asked", EXTREMES, ids=str)
async def test_no_value_that_gets_through_ends_the_engine(engine: LlamacppEngine, asked: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 0.8, "seed": 1, **asked})
    for logprobs in (None, 20):
        stream = await begin(engine, PARIS, 3, sampling=sampling, logprobs=logprobs)
        await settled(stream)
        assert [type(error) for error in stream.errors] in ([], [BadRequest])
        assert len(stream.tokens) <= 3
    await engine.check_health()


@pytest.mark.parametrize(
    "constraint",
    [
        Regex("(" * 30 + "a" + "){2}" * 8 + ")" * 22),
        Regex("(a{140}){140}"),
        Regex("((a*)*)*b"),
        Regex("(a|a|a|a){1000}"),
        Regex("[^a]{19999}"),
        Grammar("root ::= " + "(" * 250 + "[a]" + ")*" * 250),
        Grammar("root ::= root"),
        Grammar("root ::= a\na ::= b\nb ::= a | [x]"),
        Grammar("root ::= " + " | ".join(f'"{index}"' for index in range(500))),
        Grammar("root ::= " + '"a"? ' * 60),
        Grammar('root ::= "a"{65536}'),
        JsonSchema({"type": "array", "minItems": 65_536, "items": {"type": "array", "minItems": 65_536}}),
        JsonSchema({"enum": [f"value {index}" for index in range(19_000)]}),
        JsonSchema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        JsonSchema({"$ref": "#"}),
        JsonSchema({"properties": {"a": {"$ref": "#/nowhere"}}}),
        JsonSchema({"type": "string", "pattern": "(a{140}){140}", "minLength": 65_536}),
        JsonSchema({"type": ["string"] * 5000}),
    ],
    ids=lambda constraint: str(constraint)[:60],
)
async def test_a_form_at_the_ends_of_its_bounds_is_kept_or_refused_in_time(
    engine: LlamacppEngine, constraint: Any
) -> None:
    """While it is looked at, another answer goes on."""
    try:
        stream = await begin(engine, PARIS, 4, constraint=constraint)
    except BadRequest:
        return
    await settled(stream)
    await engine.check_health()
