"""What llama.cpp is asked for, and how its chunks are read where a real model rarely leads."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.messages import Job, Sampling, Tokens
from headrace.workers.engines.llamacpp_grammar import OPTIONS, json_rule, without_options
from headrace.workers.engines.llamacpp_wire import RANDOM_SEED, request_body, split, tokens_left
from headrace.workers.engines.protocol import Generation

CONTEXT = 100


def generation(
    generated: list[int] | None = None,
    *,
    max_tokens: int | None = 10,
    choice: int = 0,
    sampling: Sampling | None = None,
) -> Generation:
    ids = [1, 2, 3]
    job = Job("", "m", Tokens(ids), max_tokens, sampling=sampling or Sampling())
    return Generation(job, ids, generated or [], max_tokens, choice)


def test_the_engine_continues_after_exactly_prompt_and_generated_tokens() -> None:
    body = request_body(generation([7, 8], max_tokens=5), CONTEXT)
    assert body["prompt"] == [1, 2, 3, 7, 8]
    assert body["max_tokens"] == 5


@pytest.mark.parametrize(
    ("generated", "max_tokens", "left"),
    [([], None, 97), ([4] * 7, None, 90), ([], 500, 97), ([], 5, 5), ([], 0, 0), ([4] * 97, None, 0), ([4] * 99, 3, 0)],
)
def test_tokens_left_is_what_was_asked_as_far_as_the_context_goes(
    generated: list[int], max_tokens: int | None, left: int
) -> None:
    assert tokens_left(generation(generated, max_tokens=max_tokens), CONTEXT) == left


def test_absent_sampling_is_what_openai_does() -> None:
    body = request_body(generation(), CONTEXT)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert (body["frequency_penalty"], body["presence_penalty"], body["logit_bias"]) == (0.0, 0.0, [])
    assert body["seed"] == RANDOM_SEED


def test_given_sampling_is_passed_on_and_zero_stays_zero() -> None:
    sampling = Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        frequency_penalty=1.0,
        presence_penalty=-1.0,
        logit_bias={7: -100},
    )
    body = request_body(generation(sampling=sampling), CONTEXT)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.0, 0.5, 5, 0.1)
    assert (body["frequency_penalty"], body["presence_penalty"], body["logit_bias"]) == (1.0, -1.0, [[7, -100]])


def test_penalties_and_a_grammar_are_passed_on_and_have_no_effect_if_absent() -> None:
    body = request_body(generation(), CONTEXT)
    assert (body["repeat_penalty"], body["repeat_last_n"], body["typical_p"], body["ignore_eos"]) == (
        1.0,
        64,
        1.0,
        False,
    )
    assert "grammar" not in body
    sampling = Sampling(repeat_penalty=1.3, repeat_last_n=0, typical_p=0.5)
    body = request_body(generation(sampling=sampling), CONTEXT, 'root ::= "a"')
    assert (body["repeat_penalty"], body["repeat_last_n"], body["typical_p"]) == (1.3, 0, 0.5)
    assert body["grammar"] == 'root ::= "a"'


@pytest.mark.parametrize("seed", [0, 7, -1, RANDOM_SEED, 2**63 - 1])
def test_choices_of_a_seeded_job_differ_and_no_seed_is_the_random_one(seed: int) -> None:
    seeds = [request_body(generation(choice=c, sampling=Sampling(seed=seed)), CONTEXT)["seed"] for c in range(3)]
    assert len(set(seeds)) == 3
    assert all(0 <= s < RANDOM_SEED for s in seeds)


def test_swallowed_tokens_come_back_from_their_bytes() -> None:
    ids = {b" ": 1, b" \xf0\x9f": 2, b"\xf0": 3, b"\x9f": 4, b"\x98": 5, b"a": 6}
    assert split(ids, b" \xf0\x9f", 1) == [2]
    assert split(ids, b" \xf0\x9f\x98", 2) == [2, 5]
    assert split(ids, b" \xf0\x9f\x98", 4) == [1, 3, 4, 5]
    assert split(ids, b" \xf0\x9f\x97", 2) is None
    assert split(ids, b"", 1) is None


HUGE = 2**63 - 1


def asked(**fields: Any) -> dict[str, Any]:
    return request_body(generation(sampling=Sampling(**fields)), 512)


def test_nothing_is_made_as_long_as_a_request_says() -> None:
    assert [asked(repeat_last_n=value)["repeat_last_n"] for value in (-1, 0, 5, HUGE)] == [512, 0, 5, 512]
    assert [asked(top_k=value)["top_k"] for value in (-HUGE, 0, 5, HUGE)] == [0, 0, 5, 2**31 - 1]
    assert [asked(temperature=value)["temperature"] for value in (1e-38, 1e-3, 0.5)] == [0.0, 1e-3, 0.5]


def test_what_llguidance_is_told_is_not_the_callers_to_say() -> None:
    mine: dict[str, Any] = {"type": "object", OPTIONS: {"lenient": True, "whitespace_flexible": True}}
    assert '"lenient": false' in json_rule(mine) and "true" not in json_rule(mine).replace('"coerce_one_of": true', "")
    assert without_options(mine) == {"type": "object"}
