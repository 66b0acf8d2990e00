"""The depth check, and how a body that cannot be read is refused."""

from __future__ import annotations

import contextlib
import json
import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.api.body import MAX_BRACKETS, check_depth, decode
from headrace.broker.errors import BadRequest
from headrace.broker.settings import ApiSettings

LIMITS = ApiSettings()
MIB = 1 << 20


def _nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def test_h7_the_deepest_body_that_is_allowed_passes() -> None:
    check_depth(_nested(LIMITS.max_depth), LIMITS)
    check_depth(b"[" + _nested(LIMITS.max_depth - 1) * 1_000 + b"]", LIMITS)


@pytest.mark.parametrize("depth", [65, 100, 500, 3_000, 100_000, 2_000_000])
@pytest.mark.parametrize("body", [b"%b", b'{"tools":%b}', b'{"x":"]]]","y":%b}', b'["\\"]\\\\",%b]'])
def test_h7_a_body_that_is_too_deep_is_refused(depth: int, body: bytes) -> None:
    with pytest.raises(BadRequest):
        check_depth(body % _nested(depth), LIMITS)


@pytest.mark.parametrize("text", ["[" * 100_000, '"[' * 1000, "\\[{" * 1000, "\\", '\\"' + "[" * 100])
def test_h7_brackets_in_strings_are_no_depth(text: str) -> None:
    check_depth(json.dumps([text, {text: [text]}]).encode(), LIMITS)


def test_h7_brackets_that_are_too_many_are_refused() -> None:
    check_depth(b"[]" * (MAX_BRACKETS // 2), LIMITS)
    with pytest.raises(BadRequest):
        check_depth(b"[]" * (MAX_BRACKETS // 2) + b"[", LIMITS)


@pytest.mark.parametrize(
    "filling",
    [b'"",', b'"', b'\\"', b'"\\"', b'"a\\', b"\\", b'"\\\\"', b" ", b"[]", b'{"":""},', b"\xff", b"a"],
)
@pytest.mark.parametrize("start", [b"", b'"', b"[" * 64 + b"]" * 64 + b'["', b"{" * 64 + b"}" * 65])
def test_h7_no_body_of_4_mib_keeps_the_check_busy(start: bytes, filling: bytes) -> None:
    body = start + filling * (4 * MIB // len(filling))
    began = time.process_time()
    with contextlib.suppress(BadRequest):
        check_depth(body, LIMITS)
    assert time.process_time() - began < 1


_json = st.recursive(
    st.text(alphabet='ab[]{}"\\é') | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='[]{}"\\'), inner, max_size=3),
    max_leaves=20,
)


def _depth(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


@given(_json, st.booleans())
def test_h7_the_depth_is_counted_as_json_has_it(value: object, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    depth = _depth(value)
    check_depth(body, ApiSettings(max_depth=depth))
    if depth:
        with pytest.raises(BadRequest):
            check_depth(body, ApiSettings(max_depth=depth - 1))


class _Inner(msgspec.Struct):
    role: str


class _Outer(msgspec.Struct):
    inner: list[_Inner]
    names: list[str] = []
    biases: dict[str, float] = {}


_decoder = msgspec.json.Decoder(_Outer)


def test_h5_a_byte_order_mark_is_ignored() -> None:
    assert decode(_decoder, b'\xef\xbb\xbf{"inner":[]}', LIMITS) == _Outer([])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"inner":[{"role":"a"},{"role":5}]}', "inner[1].role"),
        (b'{"inner":[{}]}', "inner[0].role"),
        (b'{"inner":[5]}', "inner"),
        (b'{"inner":5}', "inner"),
        (b'{"inner":[],"names":[null]}', "names"),
        (b'{"inner":[],"biases":{"1":"2"}}', "biases"),
        (b"{}", "inner"),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
    ],
)
def test_h4_a_wrong_field_is_named(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(_decoder, body, LIMITS)
    assert caught.value.param == param
    assert (param or "body") in caught.value.message
    assert "$" not in caught.value.message and "_Inner" not in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"\xef\xbb\xbf",
        b'{"inner":',
        b'{"inner":[]} x',
        b'{"inner":[],"names":["\xff"]}',
        b'{"inner":[],"names":["\\ud800"]}',
        b'{"inner":[],"names":["\\udc00\\ud800"]}',
        b'{"inner":[],"names":["\xed\xa0\x80"]}',
        b'{"inner":[],"biases":{"1":NaN}}',
        '{"inner":[]}'.encode("utf-16"),
    ],
)
def test_h4_a_body_that_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(_decoder, body, LIMITS)
    assert caught.value.param is None and "JSON" in caught.value.message


def test_h7_a_decoder_that_runs_out_of_stack_is_the_callers_mistake() -> None:
    with pytest.raises(BadRequest):
        decode(_decoder, b'{"inner":[],"x":' + _nested(100_000) + b"}", ApiSettings(max_depth=10**9))
