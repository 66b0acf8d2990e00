"""Nothing that comes from outside is code: no reader of ours can make objects of bytes that somebody else chose."""

from __future__ import annotations

import ast
import gc
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from headrace.broker import api_keys, messages
from headrace.broker.hints import decode_hint

ROOT = Path(__file__).parents[1]
ROOMS = ("api", "broker", "client", "cluster", "cli", "workers")
MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle", "pandas"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.load",
    "numpy.load",
    "np.load",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    gc.collect()  # a finalizer that fails while a tree is built breaks the building (CPython 3.11)
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            yield str(file.relative_to(ROOT)), ast.parse(file.read_text("utf-8"))


def named(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{named(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call) and named(node.func) in CALLS:
            yield named(node.func)


def test_no_module_of_ours_reads_pickles_or_runs_text() -> None:
    assert [(file, danger) for file, tree in sources() for danger in dangers(tree)] == []


def test_the_search_finds_what_it_is_for() -> None:
    text = "import pickle\nfrom dill import loads\nyaml.load(x)\neval(x)\nmodel.eval()\nre.compile(x)"
    assert list(dangers(ast.parse(text))) == ["pickle", "dill", "yaml.load", "eval"]


class Bomb:
    """Leaves a mark where it is unpickled."""

    went_off = False

    def __reduce__(self) -> tuple[Callable[..., None], tuple[()]]:
        return _go_off, ()


def _go_off() -> None:
    Bomb.went_off = True


@pytest.mark.parametrize(
    "read",
    [messages.decode_job, messages.decode_view, lambda data: messages.decode_entry("1-0", data), decode_hint,
     messages.decode_decision],
)  # fmt: skip
def test_a_pickle_in_redis_is_an_error_and_does_nothing(read: Callable[[bytes], object]) -> None:
    with pytest.raises((msgspec.DecodeError, ValueError)):
        read(pickle.dumps(Bomb()))
    assert not Bomb.went_off


def test_a_pickle_in_place_of_a_stored_key_is_no_key() -> None:
    assert api_keys.decode(pickle.dumps(Bomb())) is None
    assert not Bomb.went_off
