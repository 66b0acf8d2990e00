"""Who gets the GPUs when they do not suffice."""

from __future__ import annotations

from headrace.cluster.budget import Want, split


def test_without_a_budget_everybody_gets_what_he_wants() -> None:
    assert split([Want("a", 5, 1, 1), Want("b", 7, 0, 8)], None) == {"a": 5, "b": 7}


def test_the_higher_priority_is_served_first_but_nobody_loses_his_least() -> None:
    wants = [Want("chat", 8, 1, 1, priority=10), Want("batch", 8, 2, 1, priority=0)]
    assert split(wants, 8) == {"chat": 6, "batch": 2}


def test_equals_share_in_proportion_to_what_they_want() -> None:
    assert split([Want("a", 8, 0, 1), Want("b", 4, 0, 1)], 6) == {"a": 4, "b": 2}


def test_what_is_too_large_for_the_rest_leaves_it_to_others() -> None:
    assert split([Want("large", 2, 0, 4, priority=1), Want("small", 4, 0, 1)], 6) == {"large": 1, "small": 2}


def test_models_without_gpus_are_not_bounded() -> None:
    assert split([Want("cpu", 3, 0, 0), Want("gpu", 3, 0, 1)], 1) == {"cpu": 3, "gpu": 1}
