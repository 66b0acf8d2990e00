"""What a request is thought to cost."""

from __future__ import annotations

import pytest

from headrace.api import estimate
from headrace.broker.messages import Chat, Job, Message, Prompt, Text, Tokens


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        (Text(""), 0),
        (Text("x"), 1),
        (Text("x" * 10), 3),
        (Text("x" * 11), 4),
        (Text("é" * 5), 3),
        (Chat([Message("system", "x" * 5), Message("user", "x" * 5)]), 3),
        (Tokens([7, 8]), 2),
    ],
)
def test_a_prompt_is_three_tokens_in_ten_bytes_unless_it_is_tokens(prompt: Prompt, tokens: int) -> None:
    assert estimate.prompt_tokens(prompt) == tokens


@pytest.mark.parametrize(("limit", "n", "cost"), [(None, 1, 259), (8, 1, 11), (8, 3, 27), (2**63 - 1, 1, 2051)])
def test_a_job_costs_its_prompt_and_what_its_choices_may_say(limit: int | None, n: int, cost: int) -> None:
    job = Job("0" * 32, "m", Text("x" * 10), max_tokens=limit, n=n)
    assert estimate.cost_tokens(job, context_tokens=2048) == cost
