"""Every engine on the same real weights, in the interpreter that has them all: `make test` runs these there.

Where vLLM is not installed, nothing of this folder is collected;
`tests/system/test_weights.py` says whether that is a fault.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.models import LlamacppModel, Model, TransformersModel, VllmArguments, VllmModel
from headrace.workers import engines
from headrace.workers.engines.protocol import Engine
from tests.workers.llamacpp_runs import CONTEXT, DATA_DIR, REPO, default_model

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

ARGUMENTS = VllmArguments(dtype="bfloat16", enforce_eager=True, kv_cache_memory_bytes=128 << 20, block_size=32)


def model_of(engine: str, **fields: object) -> Model:
    """The default model on this engine, in a size for tests."""
    shipped = default_model()
    if engine == "llamacpp":
        model: Model = shipped
    elif engine == "vllm":
        model = VllmModel(
            name="smollm2-135m-instruct-vllm",
            source=shipped.source,
            system=shipped.system,
            slots=shipped.slots,
            context_tokens=CONTEXT,
            threads=1,
            tool_parser="hermes",
            chat_template=str(REPO / "examples" / "hermes-tools.jinja"),
            arguments=ARGUMENTS,
        )
    else:
        model = TransformersModel(
            name="smollm2-135m-instruct-transformers",
            source=shipped.source,
            system=shipped.system,
            slots=shipped.slots,
            context_tokens=CONTEXT,
            threads=1,
        )
    return msgspec.structs.replace(model, **fields)


class Loaded:
    """An engine, and what it said while it loaded."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        model = model_of(kind)
        assert isinstance(model, LlamacppModel | VllmModel | TransformersModel)
        self.model = model
        self.engine: Engine = engines.make(model, DATA_DIR)
        self.told: list[str] = []


async def _load(kind: str) -> AsyncIterator[Loaded]:
    loaded = Loaded(kind)
    await loaded.engine.load(lambda what, share: loaded.told.append(what))
    yield loaded
    await loaded.engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llamacpp() -> AsyncIterator[Loaded]:
    async for loaded in _load("llamacpp"):
        yield loaded


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm() -> AsyncIterator[Loaded]:
    async for loaded in _load("vllm"):
        yield loaded


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def transformers() -> AsyncIterator[Loaded]:
    async for loaded in _load("transformers"):
        yield loaded


@pytest.fixture(params=["llamacpp", "vllm", "transformers"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    loaded: Loaded = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture
def engine(loaded: Loaded) -> Engine:
    return loaded.engine
