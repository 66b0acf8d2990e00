"""Chat requests, whose common fields completions has too: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.api.wire.openai_extras import HARMLESS
from headrace.broker import errors
from headrace.broker.errors import BadRequest
from headrace.broker.messages import (
    Chat,
    Job,
    Message,
    Sampling,
    decode_job,
    encode,
)
from tests.api.asking import CALL, CHAT, LIMITS, USER, messages_of, parse, refused

INT64_MAX = 2**63 - 1


def test_the_defaults_are_those_of_absent_fields() -> None:
    parsed = parse()
    assert (parsed.job.model, parsed.job.prompt) == ("m", Chat([Message("user", "hi")]))
    assert (parsed.job.max_tokens, parsed.job.n, parsed.job.stop, parsed.job.sampling) == (None, 1, [], Sampling())
    assert (parsed.job.logprobs, parsed.stream, parsed.include_usage, parsed.band) == (None, False, False, None)


OPTIONAL = (
    *("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "frequency_penalty", "presence_penalty"),
    *("seed", "logit_bias", "stop", "stream", "stream_options", "user", "service_tier", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "functions", "function_call", "response_format", "audio", "modalities"),
    *("parallel_tool_calls", "reasoning_effort", "chat_template_kwargs", "enable_thinking", "guided_json", "grammar"),
    *("continue_final_message", "add_generation_prompt", "top_k", "min_p", "repetition_penalty", "ignore_eos"),
)


def test_h3_null_is_absent_for_every_optional_field() -> None:
    assert parse(**dict.fromkeys(OPTIONAL)) == parse()


def test_h3_zero_is_a_value() -> None:
    zeros = dict.fromkeys(("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty"), 0)
    parsed = parse(**zeros, logprobs=True, top_logprobs=0)
    assert parsed.job.sampling == Sampling(temperature=0, top_p=0, seed=0, frequency_penalty=0, presence_penalty=0)
    assert parsed.job.sampling.seed is not None and parsed.job.logprobs == 0
    assert parse(top_logprobs=0).job.logprobs is None


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 3}, 3),
        ({"max_tokens": 7, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 3, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
        ({"max_tokens": 1_000_000_000}, 1_000_000_000),
        ({"max_tokens": INT64_MAX}, INT64_MAX),
    ],
)
def test_h1_both_names_of_the_token_limit_are_read(fields: dict[str, Any], limit: int) -> None:
    assert parse(**fields).job.max_tokens == limit


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, "3", 3.0, 3.5, 1e9, True, INT64_MAX + 1, 2**64, 10**4000, [], {}])
def test_h1_a_token_limit_that_is_none_is_refused_by_name(name: str, value: object) -> None:
    assert refused(**{name: value}).param == name


@pytest.mark.parametrize(
    ("stop", "stops"),
    [
        ("STOP", ["STOP"]),
        (["STOP"], ["STOP"]),
        (None, []),
        ([], []),
        (["a"] * 16, ["a"] * 16),
        ("x" * 256, ["x" * 256]),
    ],
)
def test_h2_stop_is_a_string_a_list_or_nothing(stop: object, stops: list[str]) -> None:
    assert parse(stop=stop).job.stop == stops


@pytest.mark.parametrize("stop", ["", ["", "STOP"], [None], 5, {}, [["a"]], ["a"] * 17, "x" * 257, ["x" * 1_000_000]])
def test_h2_other_forms_of_stop_arerefused(stop: object) -> None:
    assert refused(stop=stop).param == "stop"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", ["", None, 5]),
        ("n", [0, -1, 17, 129, 100_000, 10**4000, "1", 1.0]),
        ("temperature", [-0.1, 2.1, 1e308, "1", True, 10**400]),
        ("top_p", [-1, 1.1, "1"]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("seed", [INT64_MAX + 1, -(2**63) - 1, 1.0, "1"]),
        ("logit_bias", [{"a": 1}, {"-1": 1}, {"1.0": 1}, {"": 1}, {"\u0661": 1}, {"9" * 5000: 1}, {str(2**31): 1}]),
        ("logit_bias", [{"1": 101}, {"1": -101}, {"1": "1"}, [], {str(i): 1 for i in range(1025)}]),
        ("stream", ["true", 1, 0]),
        ("stream_options", [{}, {"include_usage": True}, 5]),
        ("user", [5]),
        ("service_tier", ["fast", "", 1]),
        ("top_k", [-2, 2**31, 1.0]),
        ("min_p", [-0.1, 1.1]),
        ("typical_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, -1, 10.1]),
        ("repeat_penalty", [0]),
        ("repeat_last_n", [-2]),
        ("ignore_eos", [1, "true"]),
        ("logprobs", [5, 0, "true"]),
        ("top_logprobs", [-1, 21, True, 1]),
    ],
)
def test_h7_numbers_out_of_bounds_and_other_types_are_refused_by_name(name: str, values: list[object]) -> None:
    assert [refused(**{name: value}).param for value in values] == [name] * len(values)


def test_the_bounds_themselves_are_allowed() -> None:
    high = parse(n=16, temperature=2, top_p=1, frequency_penalty=2, presence_penalty=-2, seed=-(2**63), logprobs=True)
    assert (high.job.n, high.job.logprobs) == (16, 0)
    assert parse(logprobs=True, top_logprobs=20).job.logprobs == 20
    biases = {"0": -100, "5": 1.5, str(2**31 - 1): 100}
    assert parse(logit_bias=biases).job.sampling.logit_bias == {0: -100, 5: 1.5, 2**31 - 1: 100}


def test_the_largest_values_fit_the_log() -> None:
    parsed = parse(max_tokens=INT64_MAX, seed=-(2**63), logit_bias={str(2**31 - 1): 100})
    job = Job("ab", parsed.job.model, parsed.job.prompt, parsed.job.max_tokens, sampling=parsed.job.sampling)
    assert decode_job(encode(job)) == job


def test_stream_options_ask_for_usage() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={}).include_usage
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"
    for name in ("continuous_usage_stats", "include_obfuscation"):
        assert parse(stream=True, stream_options={name: False}) == parse(stream=True)
        assert refused(stream=True, stream_options={name: True}).param == f"stream_options.{name}"


@pytest.mark.parametrize(
    ("tier", "band"), [("priority", "interactive"), ("default", "default"), ("auto", "default"), ("flex", "batch")]
)
def test_a_service_tier_is_a_band(tier: str, band: str) -> None:
    assert parse(service_tier=tier).band == band


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("verbosity", "low"),
        ("reasoning", {"effort": "low"}),
        ("min_tokens", 1),
        ("stop_token_ids", [1]),
        ("bad_words", ["x"]),
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("skip_special_tokens", False),
        ("truncate_prompt_tokens", 5),
        ("prompt_logprobs", 0),
        ("chat_template", "x"),
        ("guided_choice", ["a", "b"]),
        ("guided_grammar", "x"),
        ("priority", 1),
        ("ebnf", "x"),
        ("mirostat", 2),
        ("samplers", ["top_k"]),
        ("dry_multiplier", 0.5),
        ("n_probs", 5),
        ("n_predict", 5),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
    ],
)
def test_what_would_change_the_answer_and_is_not_supported_isrefused(name: str, value: object) -> None:
    assert refused(**{name: value}).param == name


def test_what_is_not_supported_may_be_there_if_it_changes_nothing() -> None:
    same = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    assert parse(**same) == parse()
    assert parse(**{name: values[0] for name, values in HARMLESS.items() if values}) == parse()


def test_hints_are_ignored() -> None:
    hints = {"metadata": {"a": "b"}, "store": True, "prompt_cache_key": "k", "safety_identifier": "s", "user": "u"}
    assert parse(**hints, prediction={"type": "content", "content": "x"}, cache_prompt=False) == parse()


def test_h4_unknown_fields_are_ignored() -> None:
    assert parse(foo=1, bar={"deep": [[[]]]}) == parse()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":', None),
        (b"", None),
        (b"[]", None),
        (b'"x"', None),
        (b'{"model":"m"}', "messages"),
        (b'{"messages":[]}', "model"),
        (b'{"model":"m","messages":"hi"}', "messages"),
        (b'{"model":"m","messages":[]}', "messages"),
        (b'{"model":"m","messages":null}', "messages"),
        (b'{"model":"\xff","messages":[]}', None),
        (b'{"model":"m","temperature":NaN}', None),
        (b'{"model":"\\ud800","messages":[]}', None),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"documents":1e999}', "documents"),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"audio":"\\ud800"}', None),
        (b'{"model":"m","messages":[{"role":"user","content":"x"}],"audio":"\xff"}', None),
        (b'{"model":"m","tools":' + b"[" * 500 + b"]" * 500 + b"}", None),
    ],
)
def test_h4_a_bad_body_isrefused(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        CHAT.parse(body, LIMITS)
    assert caught.value.param == param


def test_h7_messages_are_bounded() -> None:
    assert refused(messages=[USER] * 4097).param == "messages"
    assert len(messages_of([USER] * 4096)) == 4096


def test_h10_developer_is_system_and_the_order_is_kept() -> None:
    roles = ["system", "developer", "user", "system", "assistant", "user"]
    messages = [{"role": role, "content": str(at)} for at, role in enumerate(roles)]
    read = messages_of(messages)
    assert [each.role for each in read] == ["system", "system", "user", "system", "assistant", "user"]
    assert "".join(each.content for each in read) == "012345"


def test_content_is_a_string_or_text_parts_and_null_only_for_the_assistant() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b", "x": 1}]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
    ]
    read = messages_of(turns)
    assert [each.content for each in read] == ["ab", "", ""]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "banana", "content": "x"}, "role"),
        ({"role": "function", "content": "x"}, "role"),
        ({"role": "tool", "content": "x"}, "tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "content"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "tool_call_id"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}, "content[1].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}, "tool_calls[0].type"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, "tool_calls[0].id"),
        ({"role": "assistant", "audio": {"id": "x"}}, "audio"),
        ({"role": 5, "content": "x"}, "role"),
        ({"content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "system", "content": None}, "content"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "user", "content": ["x"]}, "content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text"),
        ({"role": "user", "content": [{"text": "x"}]}, "content[0].type"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "tool_calls[0].function"),
        ({"role": "assistant", "function_call": {"name": "x"}}, "function_call"),
    ],
)
def test_h10_a_wrong_message_is_named_by_its_place(message: dict[str, Any], param: str) -> None:
    assert refused(messages=[USER, message]).param == f"messages[1].{param}"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.BadRequest("x", param="p"), "invalid_request_error"),
        (errors.ContextLengthExceeded(), "invalid_request_error"),
        (errors.Unauthorized(), "invalid_request_error"),
        (errors.ModelNotFound(), "invalid_request_error"),
        (errors.MethodNotAllowed(), "invalid_request_error"),
        (errors.BodyTimeout(), "invalid_request_error"),
        (errors.BodyTooLarge(), "invalid_request_error"),
        (errors.HeadersTooLarge(), "invalid_request_error"),
        (errors.QueueFull(), "rate_limit_error"),
        (errors.NoCapacity(), "server_error"),
        (errors.QueueTimeout(), "server_error"),
        (errors.Cancelled(), "server_error"),
        (errors.LogLost(), "server_error"),
        (errors.HeadraceError(), "server_error"),
    ],
)
def test_h4_the_envelope_says_the_type_by_the_status(error: errors.HeadraceError, kind: str) -> None:
    said = json.loads(CHAT.error_body(error))
    assert said == {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}
    assert CHAT.error_frame(error) == CHAT.error_body(error)
