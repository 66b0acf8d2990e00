"""Completions: only what differs from chat."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion

from headrace.api.wire.openai_completions import OpenAICompletions
from headrace.broker.errors import BadRequest
from headrace.broker.messages import (
    Alternative,
    Delta,
    Ended,
    Event,
    Finished,
    Prompt,
    Regex,
    Sampling,
    Started,
    Text,
    TokenLogprob,
    Tokens,
    ToolCallDelta,
    Usage,
)
from headrace.broker.settings import ApiSettings
from tests.api.logs import streamed, whole

COMPLETIONS = OpenAICompletions()
LIMITS = ApiSettings()


def _parse(**fields: Any) -> Any:
    return COMPLETIONS.parse(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), LIMITS).job


def _refused(**fields: Any) -> str | None:
    with pytest.raises(BadRequest) as caught:
        _parse(**fields)
    return caught.value.param


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("hi", Text("hi")),
        (["hi"], Text("hi")),
        ([1, 2, 0], Tokens([1, 2, 0])),
        ([0], Tokens([0])),
        ([[1, 2]], Tokens([1, 2])),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, read: Prompt) -> None:
    assert _parse(prompt=prompt).prompt == read


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [""], [[]], None, 5, {}, ["a", "b"], [[1], [2]], ["a", 1], [1, [2]], [1, "a"]),
        *([-1], [[-1]], [2**31], [10**30], [1.0], ["1", True], [[True]], [["a"]], [None]),
    ],
)
def test_other_prompts_are_refused(prompt: object) -> None:
    assert _refused(prompt=prompt) == "prompt" or _refused(prompt=prompt) == "prompt[0]"


def test_h4_a_missing_prompt_is_named() -> None:
    with pytest.raises(BadRequest) as caught:
        COMPLETIONS.parse(b'{"model":"m"}', LIMITS)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_h1_both_names_of_the_token_limit_are_read(name: str) -> None:
    assert _parse(**{name: 3}).max_tokens == 3
    assert [_refused(**{name: value}) for value in (0, -1, "3", 3.0, 3.5, 1e9, True)] == [name] * 7


def test_h1_no_limit_is_no_small_default() -> None:
    assert _parse().max_tokens is None


def test_h3_zero_is_a_value_and_null_is_absent() -> None:
    parsed = _parse(temperature=0, logprobs=0)
    assert (parsed.logprobs, parsed.sampling) == (0, Sampling(temperature=0))
    assert _parse(logprobs=None, echo=None, best_of=None, suffix=None) == _parse()
    assert _parse().logprobs is None


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("logprobs", [-1, 6, True, "1", 1.0]),
        ("echo", [1, "true"]),
        ("best_of", [0, 2, 100_000, "1"]),
        ("suffix", [5, {}]),
        ("tools", [[], [{"type": "function", "function": {"name": "f"}}]]),
        ("reasoning_effort", ["low"]),
        ("min_tokens", [5]),
        ("stop", ["", [None]]),
        ("n", [0, 129]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, values: list[object]) -> None:
    assert [_refused(**{name: value}) for value in values] == [name] * len(values)


def test_best_of_is_n_or_nothing() -> None:
    assert _parse(best_of=1, n=1, echo=False, suffix="") == _parse()
    assert _refused(best_of=1, n=2) == "best_of"


def test_a_suffix_goes_with_text() -> None:
    assert _parse(suffix=" end").suffix == " end"
    assert _parse(suffix="") == _parse()
    assert _refused(suffix="x", prompt=[1, 2]) == "suffix"


def test_a_constraint_is_read_here_too() -> None:
    assert _parse(guided_regex="a+").constraint == Regex("a+")


def test_echo_puts_the_prompt_before_every_choice() -> None:
    body = {"model": "m", "prompt": "hi ", "echo": True, "n": 2}
    options = COMPLETIONS.parse(json.dumps(body).encode(), LIMITS).options
    log = (Delta(0, "A", [1]), Delta(1, "B", [1]), Finished(0, "stop"), Finished(1, "stop"), Ended("done", usage=USAGE))
    frames = _fold(*log, n=2, options=options)
    choices = [choice for frame in frames for choice in frame["choices"]]
    texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in (0, 1)]
    assert texts == [choice["text"] for choice in _whole(*log, n=2, options=options)["choices"]] == ["hi A", "hi B"]


def test_echo_needs_the_text_of_the_prompt_and_no_probabilities_of_it() -> None:
    assert _refused(echo=True, prompt=[1, 2]) == "echo"
    assert _refused(echo=True, logprobs=0) == "echo"


def test_thoughts_and_calls_of_another_format_make_no_text() -> None:
    call = Delta(0, "", [2], tool_calls=[ToolCallDelta(0, "c", "f", "{}")])
    log = (Delta(0, "", [1], reasoning="hm"), call, Finished(0, "tool_calls"), Ended("done", usage=USAGE))
    (only,) = _fold(*log)
    assert (only["choices"][0]["text"], only["choices"][0]["finish_reason"]) == ("", "stop")
    assert _whole(*log)["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}


USAGE = Usage(5, 2)


def _fold(*log: Event, **view: Any) -> list[dict[str, Any]]:
    return streamed("openai.completions", (Started(5), *log), **view)


def _whole(*log: Event, **view: Any) -> dict[str, Any]:
    return whole("openai.completions", (Started(5), *log), **view)


def test_a6_a_stream_is_text_and_finish_without_a_role() -> None:
    log = (Delta(0, "A", [1]), Delta(0, "", [2]), Delta(0, "B", [3]), Finished(0, "length"), Ended("done", usage=USAGE))
    frames = _fold(*log, include_usage=True)
    head = {"id": "cmpl-ab", "object": "text_completion", "created": 1_700_000_000, "model": "m"}
    for frame, (text, reason) in zip(frames[:-1], [("A", None), ("B", None), ("", "length")], strict=True):
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        assert frame == {**head, "choices": [choice], "usage": None}
    assert (frames[-1]["choices"], frames[-1]["usage"]["total_tokens"]) == ([], 7)


def test_an_empty_answer_is_a_valid_stream() -> None:
    (only,) = _fold(Finished(0, "stop"), Ended("done", usage=USAGE))
    assert (only["choices"][0]["text"], only["choices"][0]["finish_reason"]) == ("", "stop")


def test_h11_a_whole_response_has_its_choices_in_order() -> None:
    log = (
        Delta(1, "x", [1]),
        Delta(0, "a", [1]),
        Finished(1, "stop"),
        Finished(0, "length"),
        Ended("done", usage=USAGE),
    )
    answer = _whole(*log, n=2)
    Completion.model_validate(answer)
    assert (answer["object"], answer["id"], answer["usage"]["total_tokens"]) == ("text_completion", "cmpl-ab", 7)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "a", "length"),
        (1, "x", "stop"),
    ]


def test_log_probabilities_are_lists_side_by_side_with_offsets_in_characters() -> None:
    def step(text: str, piece: bytes, *top: Alternative) -> Delta:
        return Delta(0, text, [1], [TokenLogprob(1, piece, -0.5, list(top))])

    log = (
        step("é", "é".encode(), Alternative(2, b"x", -1.0), Alternative(1, "é".encode(), -0.5)),
        step("", b"\xf0\x9f"),
        step("😀", b"\x98\x80"),
        step("b", b"b", Alternative(3, b"\xff", -0.1), Alternative(4, b"\xfe", float("-inf"))),
        step("", b"ST"),
        Finished(0, "stop", "STOP"),
        Ended("done", usage=USAGE),
    )
    frames = _fold(*log, logprobs=True)
    first, second, third, last = [frame["choices"][0]["logprobs"] for frame in frames]
    assert first == {
        "tokens": ["é"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"x": -1.0, "é": -0.5}],
        "text_offset": [0],
    }
    assert (second["tokens"], second["text_offset"]) == (["\ufffd", "\ufffd\ufffd"], [1, 1])
    assert (third["text_offset"], third["top_logprobs"]) == ([2], [{"\ufffd": -0.1, "b": -0.5}])
    assert last is None

    answer = _whole(*log, logprobs=True)
    Completion.model_validate(answer)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert answer["choices"][0]["logprobs"][name] == [*first[name], *second[name], *third[name]]
