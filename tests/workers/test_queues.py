"""Which queues a replica asks first: those of what it has loaded, but none is left to the others for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.models import Adapter, ScriptedModel
from headrace.workers.queues import Queues

NAMES = ["a", "b", "c", "d", "e"]


def queues(adapters_loaded: int = 2) -> Queues:
    adapters = [Adapter(name) for name in NAMES]
    return Queues(ScriptedModel(name="base", adapters=adapters, adapters_loaded=adapters_loaded))


def test_a_model_without_adapters_has_one() -> None:
    assert Queues(ScriptedModel(name="m")).order() == ["m"]


def test_what_is_loaded_comes_first_and_what_was_used_least_lately_has_gone() -> None:
    asked = queues()
    for name in ("a", "b", "a", "c"):
        asked.took(name)
    orders = [asked.order() for _ in range(4)]
    assert [set(order[:3]) for order in orders[1:]] == [{"base", "a", "c"}] * 3
    assert all(sorted(order) == sorted(["base", *NAMES]) for order in orders)


@given(st.lists(st.sampled_from(NAMES), max_size=30), st.integers(1, 5))
def test_every_queue_is_the_first_one_again_and_again(took: list[str], loaded: int) -> None:
    asked = queues(loaded)
    firsts = set()
    for turn in range(24):
        if took:
            asked.took(took[turn % len(took)])
        firsts.add(asked.order()[0])
    assert firsts == {"base", *NAMES}
